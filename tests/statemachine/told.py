"""Sequences written by hand for dangers that chance rarely meets, each with the lives that its jobs must have."""

# ruff: noqa: RUF005  (lists are added, so that steps that belong together share a line)
from __future__ import annotations

from typing import Any

Step = tuple[str, dict[str, Any]]


def _create(kind: int, key: int | None = None, plan: str = "", variant: int = 0) -> Step:
    return "create", {"user": 0, "kind": kind, "key": key, "variant": variant, "plan": plan}


def _deliver(seat: int = 0, plan: str = "") -> Step:
    return "deliver", {"seat": seat, "queue": 0, "plan": plan}


def _work(outcome: str = "ok", plan: str = "", n: int = 0) -> Step:
    return "work", {"n": n, "outcome": outcome, "plan": plan}


def _pass(name: str, plan: str = "") -> Step:
    return name, {"plan": plan}


def _advance(seconds: float) -> Step:
    return "advance", {"seconds": seconds}


GO_ON: Step = ("go_on", {"n": 0, "order": ""})
CANCEL: Step = ("cancel", {"n": 0, "plan": ""})
RETRY: Step = ("retry", {"n": 0, "plan": ""})
SOON, LATER, STUBBORN, SCRIPTED = range(4)

TOLD: dict[str, tuple[list[Step], set[str]]] = {
    "a worker that slept through its takeover finds its paid answer refused": (
        # Up to the answer; then nobody beats, another worker takes over and saves its own.
        [_create(LATER), _deliver(0), GO_ON, GO_ON, _advance(100), _pass("reap"), _advance(6), _pass("dispatch")]
        + [_deliver(1), _work(n=1), _work(n=0)],
        {"cards_later created locked provider_called lease_lost locked provider_called output_saved succeeded"},
    ),
    "a worker that dies between the saved answer and the projection has it projected unpaid": (
        [_create(LATER), _deliver(0), _work(plan="1:after_commit"), _advance(100), _pass("reap")],
        {"cards_later created locked provider_called output_saved lease_lost locked succeeded"},
    ),
    "a saved answer whose COMMIT got no reply is saved once": (
        [_create(SOON), _deliver(0), _work(plan="1:lost_after")],
        {"cards_soon created locked provider_called output_saved succeeded"},
    ),
    "a call whose opening got no reply is opened once": (
        [_create(SOON), _deliver(0), _work(plan="0:lost_after")],
        {"cards_soon created locked provider_called output_saved succeeded"},
    ),
    "a success whose COMMIT got no reply is a success": (
        [_create(SOON), _deliver(0), _work(plan="2:lost_after")],
        {"cards_soon created locked provider_called output_saved succeeded"},
    ),
    "a retry of a cancelled job with a saved answer projects it and buys nothing": (
        [
            _create(SOON),
            _deliver(0),
            GO_ON,
            GO_ON,
            ("answer", {"n": 0, "outcome": "ok"}),
            GO_ON,
            CANCEL,
            _work(),
            RETRY,
        ],
        {
            "cards_soon created locked provider_called output_saved cancel_requested cancelled",
            "cards_soon created locked succeeded",
        },
    ),
    "a cancel that comes before the answer is saved keeps the answer and ends the job": (
        [_create(LATER), _deliver(0), GO_ON, GO_ON, CANCEL, _work()],
        {"cards_later created locked provider_called cancel_requested output_saved cancelled"},
    ),
    "a drained worker gives its job back and its late answer changes nothing": (
        [_create(LATER), _deliver(0), GO_ON, GO_ON, ("drain", {"seat": 0, "plan": ""}), _pass("dispatch"), _deliver(1)],
        {"cards_later created locked provider_called released locked provider_called output_saved succeeded"},
    ),
    "a killed worker's seat is taken again and its job goes on at once": (
        [_create(SOON), _deliver(0), GO_ON, GO_ON, ("kill", {"seat": 0}), ("restart", {"seat": 0, "plan": ""})],
        {"cards_soon created locked provider_called lease_lost locked provider_called output_saved succeeded"},
    ),
    "five lost workers end a job": (
        [_create(SOON)]
        + 5
        * [
            *(_deliver(0), GO_ON, GO_ON, ("kill", {"seat": 0}), ("restart", {"seat": 0, "plan": ""})),
            *(_advance(6), _pass("dispatch")),
        ],
        {"cards_soon created" + 5 * " locked provider_called lease_lost" + " failed"},
    ),
    "an event that can't be sent three times ends its job, and a retry runs": (
        [("cut_broker", {}), _create(LATER), ("mend_broker", {}), ("refuse", {"n": 0, "times": 3})]
        + [_advance(20), _pass("dispatch"), _advance(11), _pass("dispatch"), _advance(21), _pass("dispatch"), RETRY],
        {"cards_later created locked failed", "cards_later created locked provider_called output_saved succeeded"},
    ),
    "a dispatcher that dies on an event each time ends its job": (
        [("cut_broker", {}), _create(LATER), ("mend_broker", {}), _advance(20)]
        + 3 * [_pass("dispatch", "0:after_commit"), _advance(61), _pass("release_claims")],
        {"cards_later created locked failed"},
    ),
    "a key that was used before its job was deleted runs nothing again": (
        [_create(SCRIPTED, key=0), _deliver(0), _work(), _advance(5), _pass("dispatch"), _deliver(0), _work()]
        + [("pass_days", {"days": 181}), _pass("prune", "0:lost_after"), _create(SCRIPTED, key=0)]
        + [_create(SCRIPTED, key=0, variant=1)],
        set(),
    ),
    "a key runs again once even its tombstone is gone": (
        [_create(SCRIPTED, key=0), _deliver(0), _work(), _advance(5), _pass("dispatch"), _deliver(0), _work()]
        + [("pass_days", {"days": 181}), _pass("prune"), ("pass_days", {"days": 366}), _pass("prune")]
        + [_create(SCRIPTED, key=0)],
        {"scripted created locked retry_scheduled locked succeeded"},
    ),
    "a broker that lost all in mid-work is filled again": (
        [_create(SOON), _create(LATER), _create(SCRIPTED), _deliver(0), ("flush", {}), _advance(6), _pass("redrive")]
        + [_deliver(0), _deliver(1), _work(), _work(), _work()],
        {"scripted created locked retry_scheduled locked succeeded"},
    ),
    "a creator that dies before it sends leaves its job to the dispatcher": (
        [_create(LATER, plan="2:after_commit"), _advance(2), _pass("dispatch"), _deliver(0), _work()],
        {"cards_later created locked provider_called output_saved succeeded"},
    ),
    "a reaper that gets no reply takes one lease once": (
        [
            _create(LATER),
            _deliver(0),
            GO_ON,
            GO_ON,
            ("kill", {"seat": 0}),
            _advance(100),
            _pass("reap", "0:lost_after"),
        ],
        {"cards_later created locked provider_called lease_lost locked provider_called output_saved succeeded"},
    ),
    "a call that its own worker never heard of is given up when the attempt runs out of time": (
        # Found: the opening's COMMIT took effect, its answer was lost, and the worker died before it asked.
        [_create(SOON), _deliver(0), GO_ON, ("go_on", {"n": 0, "order": "lost_after"}), _advance(61)]
        + [("watch", {"seat": 0, "plan": ""}), ("kill", {"seat": 0})],
        {"cards_soon created locked provider_called failed"},
    ),
    "a job that can't be cancelled goes on": (
        [_create(STUBBORN), CANCEL, _deliver(0), GO_ON, GO_ON, CANCEL, _work()],
        {"cards_stubborn created locked provider_called output_saved succeeded"},
    ),
}
"""By the sentence that says the danger."""
