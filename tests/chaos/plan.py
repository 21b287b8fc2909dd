"""The plan of a seed: every action and every fault of a run, with their times.

An action refers to earlier ones by number, not to the current state, so a seed is the same sequence on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aijobs.definitions.definition import QUEUES
from aijobs.queues.broker import queue_key
from tests.chaos.crashes import POINTS, STOP_POINTS

ACTIONS_PER_S = 5.0
FAULT_GAP_S = (0.5, 1.5)
USERS = tuple(f"learner-{n}" for n in range(12))

WORKERS = ("interactive-1", "interactive-2", "background")
MAINTENANCE = ("maintenance-1", "maintenance-2")
WEB = "web"
QUEUE_KEYS = tuple(queue_key(name) for name in QUEUES)

SYNTHETIC, CHAOS, SERVED, FLASHCARDS = "synthetic", "chaos", "served", "flashcard_generation"
SHARES = {SYNTHETIC: 25, CHAOS: 25, SERVED: 32, FLASHCARDS: 18}
"""Percentage of each job type. Every second job calls a server."""

NOTES = (
    "Osmosis is the movement of water across a partially permeable membrane. Pure water boils at 100 °C at sea level. "
    "Photosynthesis is the process by which plants turn light into chemical energy. "
    "The mitochondrion is the organelle that produces most of the cell's energy."
)


@dataclass(frozen=True)
class Script:
    """The script of a job: its calls, and the code with which it fails without faults (None: it succeeds)."""

    name: str
    calls: tuple[Mapping[str, Any], ...] = ()
    fails_with: str | None = None
    projector_raises: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()
    """For a server: its step in each call, by the name in `provider.STEPS`. The last one is used again."""


def _sleeps(name: str, ms: int) -> Script:
    return Script(name, ({"sleep_ms": ms},))


POISONED = "INTERNAL_WORKER_LOST"
BUSY = {"raise": "PROVIDER_UNAVAILABLE"}
COMMON_SCRIPTS = (
    (4, _sleeps("quick", 20)),
    (5, _sleeps("steady", 250)),
    (2, _sleeps("slow", 900)),
    (3, _sleeps("longer than a lease", 3200)),
    (2, Script("busy once", (BUSY, {"sleep_ms": 30}))),
    (1, Script("always busy", (BUSY,), "PROVIDER_UNAVAILABLE")),
    (1, Script("blocked", ({"raise": "CONTENT_SAFETY_BLOCKED"},), "CONTENT_SAFETY_BLOCKED")),
)
CHAOS_SCRIPTS = (
    *COMMON_SCRIPTS,
    (2, Script("garbled once", ({"sleep_ms": 30, "garbled": True}, {"sleep_ms": 30}))),
    (2, Script("projected at the second try", ({"sleep_ms": 30},), projector_raises=(1,))),
    (1, Script("poison", ({"sleep_ms": 100, "dies": True},), POISONED)),
    (1, Script("never projected", ({"sleep_ms": 30},), "INTERNAL_PROJECTION", tuple(range(1, 21)))),
)


def _served(name: str, *answers: str, fails_with: str | None = None, raises: tuple[int, ...] = ()) -> Script:
    return Script(name, fails_with=fails_with, projector_raises=raises, answers=answers or (name,))


SERVED_SCRIPTS = (
    (4, _served("good")),
    (5, _served("slow")),
    (2, _served("slower than a lease")),
    *((1, _served(f"{fault} once", fault, "good")) for fault in ("429", "500", "503", "reset", "blank", "truncated")),
    *((1, _served(f"{fault} once", fault, "slow")) for fault in ("prose", "cut stream", "stall", "hang")),
    (2, _served("reset mid-body once", "reset mid-body", "good")),
    (2, _served("close after work once", "close after work", "slow")),
    (1, _served("503, 429 and 500", "503", "429", "500", "good")),
    (1, _served("always 503", "503", fails_with="PROVIDER_UNAVAILABLE")),
    (1, _served("filtered", "content filter", fails_with="CONTENT_SAFETY_PROVIDER")),
    (1, _served("served, projected at the second try", "good", raises=(1,))),
)
CARD_SCRIPTS = (
    (3, _served("good")),
    (3, _served("slow cards")),
    *((1, _served(f"{fault} once", fault, "good")) for fault in ("truncated", "blank", "close after work")),
    # The second route answers in the same attempt.
    *((1, _served(f"always {fault}", fault)) for fault in ("503", "429", "hang")),
)
SCRIPTS = {SYNTHETIC: COMMON_SCRIPTS, CHAOS: CHAOS_SCRIPTS, SERVED: SERVED_SCRIPTS, FLASHCARDS: CARD_SCRIPTS}


@dataclass(frozen=True)
class Create:
    """A job to create. Its target id contains `number`."""

    number: int
    job_type: str
    user_id: str
    key: str | None
    script: Script
    size: int
    priority: int

    @property
    def target_id(self) -> str:
        return f"c{self.number}"

    @property
    def is_served(self) -> bool:
        """Return whether the job calls a server."""
        return self.job_type in (SERVED, FLASHCARDS)

    @property
    def input(self) -> dict[str, Any]:
        """Return the job's input, which is the same in each repeat."""
        calls = [dict(call) for call in self.script.calls]
        if self.job_type == SYNTHETIC:
            return {"calls": [{**call, "artifacts": self.size} for call in calls]}
        if self.job_type == SERVED:
            raises = list(self.script.projector_raises)
            return {"note": self.target_id, "items": self.size, "projector_raises": raises}
        if self.job_type == CHAOS:
            return {"items": self.size, "calls": calls, "projector_raises": list(self.script.projector_raises)}
        return {
            "lang": "en",
            "source": {"id": self.target_id, "title": f"note {self.target_id}"},
            "segments": [{"sid": "p1", "text": NOTES}],
            "options": {"max_cards": self.size, "card_types": ["basic", "cloze"]},
        }


@dataclass(frozen=True)
class Action:
    """`create`, `repeat` (the same request under the same key), `cancel` or `retry` of a create."""

    at: float
    kind: str
    create: Create

    def __str__(self) -> str:
        return (
            f"{self.at:7.2f}  {self.kind} {self.create.target_id} ({self.create.job_type}, {self.create.script.name})"
        )


@dataclass(frozen=True)
class Fault:
    """A fault: `target` is a process or a crash point, `lasts` is in seconds, `count` is the passes before a crash."""

    at: float
    kind: str
    target: str = ""
    lasts: float = 0.0
    count: int = 0
    seed: int = 0

    def __str__(self) -> str:
        extent = f" for {self.lasts:.1f} s" if self.lasts else ""
        return f"{self.at:7.2f}  {self.kind} {self.target}{extent}".rstrip()


@dataclass(frozen=True)
class Plan:
    """All actions and faults of a run."""

    seed: int
    seconds: float
    actions: tuple[Action, ...]
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        steps: list[Action | Fault] = sorted([*self.actions, *self.faults], key=lambda step: step.at)
        return "\n".join(map(str, steps)) + "\n"


def build_plan(seed: int, seconds: float, database_kind: str) -> Plan:
    """Build the plan of a seed. A longer plan begins with the same steps as a shorter one."""
    actions = tuple(_actions(random.Random(f"actions {seed}"), seconds))
    faults = tuple(_faults(random.Random(f"faults {seed} {database_kind}"), seconds, database_kind))
    return Plan(seed, seconds, actions, faults)


# --- actions -------------------------------------------------------------------------------------------------------


def _actions(rng: random.Random, seconds: float) -> Iterator[Action]:
    created: list[Action] = []
    worth_retrying: list[Action] = []
    later: list[Action] = []
    at = 0.2
    while True:
        at += rng.expovariate(ACTIONS_PER_S)
        if at > seconds:
            return
        due = [action for action in later if action.at <= at]
        later = [action for action in later if action.at > at]
        yield from sorted(due, key=lambda action: action.at)
        kind = rng.choices(("create", "cancel", "retry"), (65, 20, 15))[0]
        if kind == "create" or not created:
            create = _create(rng, len(created))
            created.append(Action(at, "create", create))
            yield created[-1]
            if create.key is not None:
                # At once, as a race with the first; soon, while the job runs; late, when it may have ended.
                later += [Action(at + wait, "repeat", create) for wait in _repeats(rng)]
            if create.script.fails_with:
                worth_retrying.append(Action(at + rng.uniform(2.0, 6.0), "retry", create))
        elif kind == "cancel":
            wanted = rng.choice(created[-8:])
            yield Action(at, "cancel", wanted.create)
            worth_retrying.append(Action(at + rng.uniform(0.5, 3.0), "retry", wanted.create))
        elif worth_retrying:
            retry = worth_retrying.pop(rng.randrange(len(worth_retrying)))
            # Sometimes twice at once: only one retry may be created.
            times = rng.choice((1, 1, 2))
            later += [Action(max(at, retry.at), "retry", retry.create)] * times


def _repeats(rng: random.Random) -> list[float]:
    waits = [(), (0.0,), (0.01, 0.5), (2.0,), (0.0, 6.0)]
    return list(rng.choice(waits))


def _create(rng: random.Random, number: int) -> Create:
    job_type = rng.choices(list(SHARES), list(SHARES.values()))[0]
    scripts = SCRIPTS[job_type]
    script = rng.choices([s for _, s in scripts], [weight for weight, _ in scripts])[0]
    key = f"key:{number} %" + rng.choice(("a", "ä", "中")) if rng.random() < 0.6 else None
    # HTTP headers are limited to Latin-1.
    key = f"key-{number}" if key is not None and job_type == FLASHCARDS else key
    return Create(number, job_type, rng.choice(USERS), key, script, rng.randint(1, 4), rng.choice((0, 40, 50, 100)))


# --- faults --------------------------------------------------------------------------------------------------------


def _faults(rng: random.Random, seconds: float, database_kind: str) -> Iterator[Fault]:
    """Yield faults from shuffled decks. Each deck contains every kind, so that none is missing for long."""
    at = 1.0
    while True:
        deck = list(_deck(rng, database_kind))
        rng.shuffle(deck)
        for card in deck:
            at += rng.uniform(*FAULT_GAP_S)
            if at > seconds:
                return
            kind, target, lasts, count = card
            if at + lasts > seconds:
                continue  # It must end before the run does.
            yield Fault(at, kind, target, lasts, count, rng.randrange(1_000_000))


def _deck(rng: random.Random, database_kind: str) -> Iterator[tuple[str, str, float, int]]:
    for point in POINTS:
        yield "crash", point, 0.0, rng.randint(0, 6) if "commit" in point else rng.randint(0, 1)
    for target in (*rng.sample(WORKERS, 2), rng.choice(MAINTENANCE), WEB):
        yield "kill", target, 0.0, 0
    # A worker that resumes after its lease expired.
    for target in (*rng.sample(WORKERS, 2), rng.choice(MAINTENANCE)):
        yield "freeze", target, rng.uniform(5.0, 7.5), 0
    for point in STOP_POINTS:
        yield "freeze at", point, rng.uniform(5.0, 7.5), rng.randint(0, 1)
    for target in (rng.choice(WORKERS), rng.choice((*WORKERS, *MAINTENANCE))):
        yield "term", target, 0.0, 0
    yield "flush", "broker", 0.0, 0
    yield "stop", "broker", rng.uniform(0.5, 3.0), 0
    yield "freeze", "broker", rng.uniform(0.5, 3.0), 0
    yield "drop", "messages", rng.uniform(2.0, 4.0), 0
    yield "refuse", rng.choice(tuple(QUEUES)), rng.uniform(1.0, 3.0), 0
    yield "stop", "provider", rng.uniform(0.5, 2.0), 0
    yield "outage", "provider", rng.uniform(1.0, 3.0), 0
    if database_kind != "sqlite":
        yield "stop", "database", rng.uniform(0.1, 1.5), 0
        yield "kill", "database", rng.uniform(0.1, 1.0), 0
