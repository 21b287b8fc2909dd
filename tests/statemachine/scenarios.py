"""Scenarios written by hand for cases that random programs rarely reach, with the lives of their jobs."""

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

SCENARIOS: dict[str, tuple[list[Step], set[str]]] = {
    "a worker that was suspended during the takeover can't save its answer": (
        # Up to the answer. Then the lease expires, and another worker takes over and saves its own answer.
        [_create(LATER), _deliver(0), GO_ON, GO_ON, _advance(100), _pass("reap"), _advance(6), _pass("dispatch")]
        + [_deliver(1), _work(n=1), _work(n=0)],
        {"cards_later created locked provider_called lease_lost locked provider_called output_saved succeeded"},
    ),
    "the answer of a worker that dies before the projection is projected without a second call": (
        [_create(LATER), _deliver(0), _work(plan="1:after_commit"), _advance(100), _pass("reap")],
        {"cards_later created locked provider_called output_saved lease_lost locked succeeded"},
    ),
    "a saved answer whose COMMIT got no reply is saved once": (
        [_create(SOON), _deliver(0), _work(plan="1:lost_after")],
        {"cards_soon created locked provider_called output_saved succeeded"},
    ),
    "a call whose opening COMMIT got no reply is opened once": (
        [_create(SOON), _deliver(0), _work(plan="0:lost_after")],
        {"cards_soon created locked provider_called output_saved succeeded"},
    ),
    "a success whose COMMIT got no reply is a success": (
        [_create(SOON), _deliver(0), _work(plan="2:lost_after")],
        {"cards_soon created locked provider_called output_saved succeeded"},
    ),
    "a retry of a cancelled job with a saved answer projects it without a call": (
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
    "a cancel before the answer is saved ends the job and keeps the answer": (
        [_create(LATER), _deliver(0), GO_ON, GO_ON, CANCEL, _work()],
        {"cards_later created locked provider_called cancel_requested output_saved cancelled"},
    ),
    "a drained worker releases its job and its late answer changes nothing": (
        [_create(LATER), _deliver(0), GO_ON, GO_ON, ("drain", {"seat": 0, "plan": ""}), _pass("dispatch"), _deliver(1)],
        {"cards_later created locked provider_called released locked provider_called output_saved succeeded"},
    ),
    "the job of a killed worker continues as soon as the worker restarts": (
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
    "an event that fails three times ends its job, and a retry runs": (
        [("cut_broker", {}), _create(LATER), ("mend_broker", {}), ("refuse", {"n": 0, "times": 3})]
        + [_advance(20), _pass("dispatch"), _advance(11), _pass("dispatch"), _advance(21), _pass("dispatch"), RETRY],
        {"cards_later created locked failed", "cards_later created locked provider_called output_saved succeeded"},
    ),
    "an event whose dispatcher dies three times ends its job": (
        [("cut_broker", {}), _create(LATER), ("mend_broker", {}), _advance(20)]
        + 3 * [_pass("dispatch", "0:after_commit"), _advance(61), _pass("release_claims")],
        {"cards_later created locked failed"},
    ),
    "the key of a deleted job creates no new job": (
        [_create(SCRIPTED, key=0), _deliver(0), _work(), _advance(5), _pass("dispatch"), _deliver(0), _work()]
        + [("pass_days", {"days": 181}), _pass("prune", "0:lost_after"), _create(SCRIPTED, key=0)]
        + [_create(SCRIPTED, key=0, variant=1)],
        set(),
    ),
    "a key creates a new job after its tombstone is deleted": (
        [_create(SCRIPTED, key=0), _deliver(0), _work(), _advance(5), _pass("dispatch"), _deliver(0), _work()]
        + [("pass_days", {"days": 181}), _pass("prune"), ("pass_days", {"days": 366}), _pass("prune")]
        + [_create(SCRIPTED, key=0)],
        {"scripted created locked retry_scheduled locked succeeded"},
    ),
    "messages that the broker lost are sent again": (
        [_create(SOON), _create(LATER), _create(SCRIPTED), _deliver(0), ("flush", {}), _advance(6), _pass("redrive")]
        + [_deliver(0), _deliver(1), _work(), _work(), _work()],
        {"scripted created locked retry_scheduled locked succeeded"},
    ),
    "the dispatcher sends the message if the creator dies first": (
        [_create(LATER, plan="2:after_commit"), _advance(2), _pass("dispatch"), _deliver(0), _work()],
        {"cards_later created locked provider_called output_saved succeeded"},
    ),
    "a lease is taken once if the reaper's COMMIT got no reply": (
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
    "a call whose opening was never confirmed is closed when the attempt times out": (
        # The opening's COMMIT took effect, its answer was lost, and the worker died before it read the row.
        [_create(SOON), _deliver(0), GO_ON, ("go_on", {"n": 0, "order": "lost_after"}), _advance(61)]
        + [("watch", {"seat": 0, "plan": ""}), ("kill", {"seat": 0})],
        {"cards_soon created locked provider_called failed"},
    ),
    "a job that can't be cancelled continues": (
        [_create(STUBBORN), CANCEL, _deliver(0), GO_ON, GO_ON, CANCEL, _work()],
        {"cards_stubborn created locked provider_called output_saved succeeded"},
    ),
}
"""Steps and expected lives by the sentence that the scenario tests."""
