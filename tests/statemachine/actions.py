"""What may happen in the world, and with which values: for the state machine, and for programs made from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.statemachine.beliefs import Beliefs
from tests.statemachine.faulty import FAULTS
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
        "kind": (*range(len(KINDS)), 0, 1, 0, 1),
        "key": (None, None, None, 0, 1),
        "variant": (0, 0, 0, 1),
        "plan": PLANS,
    },
    "deliver": {"seat": SEAT, "queue": QUEUE, "plan": PLANS},
    "go_on": {"n": NTH, "order": ORDERS},
    "answer": {"n": NTH, "outcome": OUTCOMES},
    "work": {"n": NTH, "outcome": OUTCOMES, "plan": PLANS},
    "advance": {"seconds": (1, 0.4, 5, 16, 31, 61, 91, 125, 400, 3700, 31 * 86400, 181 * 86400)},
    "dispatch": {"plan": PLANS},
    "redrive": {"plan": PLANS},
    "reap": {"plan": PLANS},
    "watch": {"seat": SEAT, "plan": PLANS},
    "cancel": {"n": NTH, "plan": PLANS},
    "retry": {"n": NTH, "plan": PLANS},
    "deliver_again": {"seat": SEAT, "n": NTH, "plan": PLANS},
    "release_claims": {"plan": PLANS},
    "kill": {"seat": SEAT},
    "restart": {"seat": SEAT, "plan": PLANS},
    "drain": {"seat": SEAT, "plan": PLANS},
    "pause": {"queue": QUEUE},
    "lose": {"n": NTH},
    "flush": {},
    "cut_broker": {},
    "refuse": {"n": NTH, "times": (1, 2, 3, 4)},
    "prune": {"plan": PLANS},
    "clean_snapshots": {"plan": PLANS},
}
"""Each action with the values that its arguments may have, the plainest first."""

WEIGHTS = {"create": 5, "deliver": 8, "go_on": 8, "answer": 4, "work": 6, "advance": 6, "dispatch": 4, "redrive": 2}
WEIGHTS |= {"reap": 3, "watch": 3, "cancel": 2, "retry": 2}


def improvise(seed: int, steps: int, world: World) -> Iterator[tuple[str, dict[str, Any]]]:
    """`steps` actions chosen by `seed`, each of those that have something to act on."""
    dice = random.Random(seed)
    names = [name for name in ACTIONS for _ in range(WEIGHTS.get(name, 1))]
    for _ in range(steps):
        name = dice.choice([name for name in names if world.can(name)])
        yield name, {argument: dice.choice(values) for argument, values in ACTIONS[name].items()}


def play(world: World, program: Program | Iterator[tuple[str, dict[str, Any]]]) -> Beliefs:
    """Do the actions, hold the world to its promises after each and in the end; the beliefs."""
    beliefs = Beliefs(world)
    try:
        for name, values in program:
            world.act(name, **values)
            beliefs.hold()
        beliefs.hold_to_the_end()
    except Exception as error:
        error.add_note(f"the program was: {world.program!r}")
        raise
    return beliefs
