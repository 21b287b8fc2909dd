"""The actions of the world and the values of their arguments, for the state machine and for programs from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.statemachine.faulty import FAULTS
from tests.statemachine.invariants import Invariants
from tests.statemachine.world import KINDS, LEAVE, SEATS, World

Program = Sequence[tuple[str, Mapping[str, Any]]]

PLANS = ("",) * 18 + tuple(f"{at}:{fault}" for at in range(3) for fault in (*FAULTS, LEAVE))
ORDERS = ("",) * 6 + FAULTS
OUTCOMES = (
    *("ok",) * 6,
    "no_json",
    "aborted",
    "PROVIDER_UNAVAILABLE",
    "PROVIDER_EMPTY_OUTPUT",
    "PROVIDER_ACCOUNT_EXHAUSTED",
)
NTH = tuple(range(6))
SEAT = tuple(range(SEATS))
QUEUE = (0, 1)

ACTIONS: dict[str, dict[str, Sequence[Any]]] = {
    "create": {
        "user": (0, 1),
        "kind": (*range(len(KINDS)), 0, 1, 2, 0, 1, 2, 3),
        "key": (None, None, None, 0, 1),
        "variant": (0, 0, 0, 1),
        "plan": PLANS,
    },
    "deliver": {"seat": SEAT, "queue": QUEUE, "plan": PLANS},
    "deliver_again": {"seat": SEAT, "n": NTH, "plan": PLANS},
    "go_on": {"n": NTH, "order": ORDERS},
    "answer": {"n": NTH, "outcome": OUTCOMES},
    "work": {"n": NTH, "outcome": OUTCOMES, "plan": PLANS},
    "watch": {"seat": SEAT, "plan": PLANS},
    "advance": {"seconds": (1, 2, 5, 0.4, 16, 31, 61, 91, 125, 400)},
    "dispatch": {"plan": PLANS},
    "redrive": {"plan": PLANS},
    "reap": {"plan": PLANS},
    "release_claims": {"plan": PLANS},
    "prune": {"plan": PLANS},
    "clean_snapshots": {"plan": PLANS},
    "cancel": {"n": NTH, "plan": PLANS},
    "retry": {"n": NTH, "plan": PLANS},
    "kill": {"seat": SEAT},
    "restart": {"seat": SEAT, "plan": PLANS},
    "drain": {"seat": SEAT, "plan": PLANS},
    "lose": {"n": NTH},
    "refuse": {"n": NTH, "times": (1, 2, 3, 4)},
    "pause": {"queue": QUEUE},
    "resume": {},
    "flush": {},
    "cut_broker": {},
    "mend_broker": {},
    "pass_days": {"days": (181, 31, 366, 0.05)},
}
"""Each action with the possible values of its arguments, the simplest first."""

KINDS_OF_ACTION: dict[str, tuple[str, ...]] = {
    "ask": ("create", "create", "cancel", "retry"),
    "arrive": ("deliver",),
    "deliver": ("mend_broker", "resume", "deliver", "deliver", "deliver", "deliver_again"),
    "work": ("work", "work", "answer", "go_on"),
    "step": ("go_on", "go_on", "answer"),
    "watch": ("watch",),
    "advance": ("advance",),
    "upkeep": ("dispatch", "dispatch", "redrive", "reap", "reap", "restart", "restart", "release_claims"),
    "trouble": (
        *("kill", "drain", "lose", "refuse", "flush", "pause"),
        *("cut_broker", "pass_days", "prune", "prune", "clean_snapshots"),
    ),
}
"""The kind is chosen first, all with the same probability, so that faults don't outnumber work."""


def improvise(seed: int, steps: int, world: World) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `steps` actions chosen by `seed`, only those that can act on something."""
    dice = random.Random(seed)
    while steps:
        name = dice.choice(KINDS_OF_ACTION[dice.choice(list(KINDS_OF_ACTION))])
        if world.can(name) and not (name == "create" and world.waiting() and dice.random() < 0.5):
            steps -= 1
            yield name, {argument: dice.choice(values) for argument, values in ACTIONS[name].items()}


def play(world: World, program: Program | Iterator[tuple[str, dict[str, Any]]]) -> Invariants:
    """Perform the actions, and check the invariants after each one and at the end."""
    invariants = Invariants(world)
    try:
        for name, values in program:
            world.act(name, **values)
            invariants.check()
        invariants.check_until_all_ended()
    except Exception as error:
        error.add_note(f"the program was: {world.program!r}")
        raise
    return invariants
