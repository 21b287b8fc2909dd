"""The verdict of a chaos run: it accepts sound evidence and finds each kind of broken promise."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from aijobs.ai.models import AiUsageLog
from aijobs.jobs.models import AiJob, AiJobEvent
from aijobs.outbox.models import OutboxEvent
from tests.chaos.broken import Broken
from tests.chaos.driver import Book
from tests.chaos.evidence import Evidence
from tests.chaos.ledger import Call
from tests.chaos.plan import CHAOS, SERVED, Action, Create, Script
from tests.chaos.provider import NAME, Billed
from tests.chaos.stage import Role
from tests.chaos.verdict import judge, judge_roles
from tests.support.rows import build_call, build_event, build_history, build_job, ended

OK = Script("quick", ({"sleep_ms": 1},))
CREATE = Create(0, CHAOS, "u1", "key-0", OK, 2, 40)
SERVED_CREATE = Create(0, SERVED, "u1", "key-0", Script("good", answers=("good",)), 2, 40)
TOKENS = {"prompt_tokens": 10, "completion_tokens": 5}


class Case:
    """One create and its job, which succeeded with two items for one provider call."""

    def __init__(self, create: Create = CREATE) -> None:
        self.create = create
        self.job = self.add_job(artifact_count=2, **ended("succeeded"))
        self.usage = build_call(self.job, id="usage-1")
        self.call = Call("usage-1", self.job.id, 1, asked=1, answered=1)
        self.book = Book()
        promise = self.book.of(create)
        promise.job_ids, promise.made, promise.chain = [self.job.id], 1, [self.job.id]
        history = build_history(self.job, "created", "locked", "provider_called", "output_saved", "succeeded")
        for event in history[1:]:
            event.attempt_no, event.actor, event.instance = 1, "worker", "host~1"
        self.jobs: dict[str, AiJob] = {self.job.id: self.job}
        self.history: dict[str, list[AiJobEvent]] = defaultdict(list, {self.job.id: history})
        self.rows: dict[str, list[AiUsageLog]] = defaultdict(list, {self.job.id: [self.usage]})
        self.events: dict[str, list[OutboxEvent]] = defaultdict(list, {self.job.id: [build_event(self.job)]})
        self.artifacts = {self.job.id: 2}
        self.cards = {self.job.id: 2}
        self.calls = {"usage-1": self.call}
        self.bill: list[Billed] = []

    def add_job(self, **fields: Any) -> AiJob:
        """Return a job of the create, with the counters that the database would fill in."""
        counters = {"retry_count": 0, "lost_count": 0, "uncharged_losses": 0, "artifact_count": 0, "max_retry_count": 4}
        return build_job(job_type=self.create.job_type, target_id=CREATE.target_id, **{**counters, **fields})

    def judge(self, *, database_faults: bool = False) -> list[str]:
        """Return the texts of the broken promises."""
        evidence = Evidence(
            self.jobs, self.history, self.rows, self.events, self.artifacts, self.cards, self.calls, self.bill
        )
        return [broken.what for broken in judge(evidence, self.book, database_faults=database_faults)]

    def fail(self, code: str, **fields: Any) -> None:
        """Change the job to failed without a result."""
        self.job.lifecycle_status, self.job.error_code, self.job.artifact_count = "failed", code, 0
        self.artifacts, self.cards = {}, {}
        for name, value in fields.items():
            setattr(self.job, name, value)


class ServedCase(Case):
    """The same with a server as the provider, whose bill contains the call."""

    def __init__(self, create: Create = SERVED_CREATE) -> None:
        super().__init__(create)
        self.call.provider = NAME
        self.usage.provider, self.usage.request_id, self.usage.http_status = NAME, "fake-1", 200
        self.bill = [self.bill_of("usage-1")]

    def bill_of(self, usage_id: str | None, number: int = 1, **fields: Any) -> Billed:
        """Return the entry of a call on the bill, by default with a complete answer."""
        answered = {"step": "good", "status": 200, "counted": TOKENS, "whole": True, "at": self.usage.started_at}
        return Billed(number, usage_id, self.job.target_id, **{**answered, **fields})

    def change_bill(self, **fields: Any) -> None:
        """Change the entry of the one call on the bill."""
        self.bill = [replace(self.bill[0], **fields)]

    def call_again(self, usage_id: str, attempt_no: int, *, asked: int = 1, **fields: Any) -> None:
        """Add another call, without an answer, to rows, ledger and bill."""
        row = {"provider": NAME, "state": "failed", "billed": "unknown", **fields}
        self.rows[self.job.id].append(build_call(self.job, id=usage_id, attempt_no=attempt_no, **row))
        self.calls[usage_id] = Call(usage_id, self.job.id, attempt_no, provider=row["provider"], asked=asked)
        if row["provider"] == NAME:
            self.bill.append(self.bill_of(usage_id, 2, step="hang", status=None, counted=None, whole=False))


def test_sound_evidence_is_accepted() -> None:
    assert Case().judge() == []
    assert ServedCase().judge() == []


def _ask_again_after_saving(case: Case) -> None:
    case.calls["usage-2"] = Call("usage-2", case.job.id, 2, asked=1)
    case.rows[case.job.id].append(build_call(case.job, id="usage-2", attempt_no=2, state="failed"))


def _second_job_of_one_key(case: Case) -> None:
    other = case.add_job(**ended("cancelled"))
    case.jobs[other.id] = other


def _unsaved_answer(case: Case) -> None:
    case.history[case.job.id] = [e for e in case.history[case.job.id] if e.type != "output_saved"]


def _zombie_wrote(case: Case) -> None:
    case.history[case.job.id][-1].instance = "host~2"


BREAKS: dict[str, tuple[Callable[[Case], Any], str]] = {
    "not ended": (lambda c: setattr(c.job, "lifecycle_status", "running"), "has not ended"),
    "cancel overruled": (lambda c: c.book.cancelled.add(c.job.id), "cancel acknowledged and is succeeded"),
    "two jobs": (_second_job_of_one_key, "is 2 jobs"),
    "two answers": (lambda c: c.book.of(CREATE).job_ids.append("x"), "answered with several jobs"),
    "made twice": (lambda c: setattr(c.book.of(CREATE), "made", 2), "said that they created the job"),
    "lost job": (lambda c: setattr(c.book.of(CREATE), "job_ids", ["x"]), "an answer named a job that does not exist"),
    "lost retry": (lambda c: c.book.of(CREATE).chain.append("x"), "a retry's answer named a job that does not exist"),
    "unasked job": (lambda c: setattr(c.job, "target_id", "c9"), "nobody asked for"),
    "result twice": (lambda c: c.cards.update({c.job.id: 4}), "4 business rows instead of 2"),
    "artifact lost": (lambda c: c.artifacts.clear(), "0 artifacts instead of 2"),
    "failed unasked": (lambda c: c.fail("INTERNAL_ERROR"), "failed with INTERNAL_ERROR"),
    "lost too early": (
        lambda c: c.fail("INTERNAL_WORKER_LOST", uncharged_losses=4),
        "failed with INTERNAL_WORKER_LOST",
    ),
    "innocent and charged": (lambda c: setattr(c.job, "lost_count", 1), "is charged with 1 losses"),
    "not dispatched": (lambda c: c.fail("INTERNAL_NOT_DISPATCHED"), "failed with INTERNAL_NOT_DISPATCHED"),
    "rest of a result": (
        lambda c: (c.fail("INTERNAL_WORKER_LOST", uncharged_losses=5), c.cards.update({c.job.id: 1})),
        "is failed with 1 business rows instead of 0",
    ),
    "bought again": (_ask_again_after_saving, "saved its answer at attempt 1 and asked again"),
    "unsaved answer": (_unsaved_answer, "that nobody saved or gave up"),
    "call without row": (lambda c: c.rows.clear(), "a provider call without its usage row"),
    "two calls, one row": (lambda c: setattr(c.call, "asked", 2), "2 calls on one usage row"),
    "open row": (lambda c: setattr(c.usage, "state", "started"), "never closed"),
    "row without answer": (lambda c: setattr(c.call, "answered", 0), "done without an answer"),
    "row without call": (lambda c: c.calls.clear(), "is done without an answer"),
    "zombie": (_zombie_wrote, "has succeeded of attempt 1, not written by its holder"),
    "surprise": (lambda c: c.book.surprise(Action(0, "cancel", CREATE), "HTTP 418"), "HTTP 418"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_promise_is_found(name: str) -> None:
    breaks, says = BREAKS[name]
    case = Case()
    breaks(case)
    assert any(says in what for what in case.judge()), case.judge()


def _asked_again_of_the_server(case: ServedCase) -> None:
    """Add a call that only the server's log contains, not the ledger."""
    case.call_again("usage-2", 2)
    del case.calls["usage-2"]


def _asked_after_its_answer(case: ServedCase) -> None:
    case.call_again("usage-2", 1, provider="local")


SERVED_BREAKS: dict[str, tuple[Callable[[ServedCase], Any], str]] = {
    "request without row": (lambda c: c.bill.append(c.bill_of("usage-9", 2)), "have no usage row"),
    "request that nobody knows": (lambda c: c.bill.append(c.bill_of(None, 2)), "have no usage row"),
    "two requests, one row": (lambda c: c.bill.append(c.bill_of("usage-1", 2)), "2 requests went out under one"),
    "another job's notes": (lambda c: c.change_bill(note="c9"), "sent notes of c9 under a row for c0"),
    "another provider's row": (lambda c: setattr(c.usage, "provider", "local"), "under a row for c0 at local"),
    "row after the request": (
        lambda c: c.change_bill(at=c.usage.started_at - timedelta(milliseconds=1)),
        "before its usage row was there",
    ),
    "another request's name": (lambda c: setattr(c.usage, "request_id", "fake-7"), "names request fake-7"),
    "a name for no request": (lambda c: c.bill.clear(), "names request fake-1, and the server calls it None"),
    "another status": (lambda c: setattr(c.usage, "http_status", 429), "was answered 429, and the server says 200"),
    "billed and broken off": (lambda c: c.change_bill(whole=False), "the server gave no answer: good"),
    "billed and turned away": (
        lambda c: c.change_bill(step="503", status=503, counted=None),
        "the server gave no answer: 503",
    ),
    "billed and never there": (lambda c: c.bill.clear(), "the server gave no answer: None"),
    "free and worked for": (lambda c: setattr(c.usage, "billed", "no"), "cost nothing, and the server did the work"),
    "other tokens": (lambda c: setattr(c.usage, "prompt_tokens", 20), "counts 20 and 5 tokens"),
    "no price": (lambda c: setattr(c.usage, "cost_micros", None), "has no price"),
    "bought again of the server": (_asked_again_of_the_server, "asked the server again: [1, 2]"),
    "saved and not done": (lambda c: setattr(c.usage, "state", "failed"), "with no call that is done"),
    "asked twice": (lambda c: c.call_again("usage-2", 1), "asked one provider twice in attempt 1"),
    "asked on": (_asked_after_its_answer, "asked another provider in attempt 1, which had its answer"),
    "gave up early": (lambda c: c.fail("PROVIDER_UNAVAILABLE", retry_count=3), "failed with PROVIDER_UNAVAILABLE"),
    "failed of nothing": (lambda c: c.fail("INTERNAL_CONFIG", retry_count=4), "failed with INTERNAL_CONFIG"),
    "lost once only": (lambda c: c.fail("PROVIDER_CONNECTION_LOST"), "failed with PROVIDER_CONNECTION_LOST"),
}


@pytest.mark.parametrize("name", SERVED_BREAKS)
def test_difference_between_rows_and_bill_is_found(name: str) -> None:
    breaks, says = SERVED_BREAKS[name]
    case = ServedCase()
    breaks(case)
    assert any(says in what for what in case.judge()), case.judge()


def test_cut_off_call_may_be_on_the_bill_and_the_next_route_may_answer() -> None:
    case = ServedCase()
    case.usage.attempt_no = case.call.attempt_no = 1
    case.usage.call_no, case.usage.provider, case.call.provider = 2, "local", "local"
    case.usage.request_id = case.usage.http_status = None
    case.bill.clear()
    calls, case.calls = case.calls, {}
    case.call_again("usage-0", 1)
    case.calls |= calls
    assert case.judge() == []
    case.change_bill(counted=TOKENS, status=200, step="reset mid-body")
    assert case.judge() == []


def test_failure_by_the_server_is_accepted_after_all_retries() -> None:
    case = ServedCase()
    case.fail("PROVIDER_UNAVAILABLE", retry_count=4)
    assert case.judge() == []
    once = ServedCase()
    once.fail("PROVIDER_CONNECTION_LOST", retry_count=1)
    tried = AiJobEvent(job_id=once.job.id, type="retry_scheduled", attempt_no=1, error_code="PROVIDER_CONNECTION_LOST")
    once.history[once.job.id].append(tried)
    assert once.judge() == []


def test_failure_by_script_or_by_five_lost_workers_is_accepted() -> None:
    lost = Case()
    lost.fail("INTERNAL_WORKER_LOST", uncharged_losses=5)
    assert lost.judge() == []
    poison = Case(Create(0, CHAOS, "u1", "key-0", Script("poison", (), "INTERNAL_WORKER_LOST"), 2, 40))
    poison.fail("INTERNAL_WORKER_LOST", lost_count=2, uncharged_losses=1)
    assert poison.judge() == []
    create = Create(0, CHAOS, "u1", "key-0", Script("blocked", (), "CONTENT_SAFETY_BLOCKED"), 2, 40)
    scripted = Case(create)
    scripted.fail("CONTENT_SAFETY_BLOCKED")
    assert scripted.judge() == []


def test_poison_job_that_fails_early_or_succeeds_is_found() -> None:
    create = Create(0, CHAOS, "u1", "key-0", Script("poison", (), "INTERNAL_WORKER_LOST"), 2, 40)
    early, survivor = Case(create), Case(create)
    early.fail("INTERNAL_WORKER_LOST", lost_count=1, uncharged_losses=1)
    assert "is poison and failed at 1 deaths of its own" in early.judge()
    assert "was to fail with INTERNAL_WORKER_LOST and succeeded" in survivor.judge()


def test_database_failure_is_accepted_only_after_a_retry() -> None:
    case = Case()
    case.fail("INTERNAL_DATABASE")
    assert case.judge(database_faults=True)
    case.history[case.job.id].append(
        AiJobEvent(job_id=case.job.id, type="retry_scheduled", attempt_no=1, error_code="INTERNAL_DATABASE")
    )
    assert case.judge(database_faults=True) == []
    assert case.judge(database_faults=False)


def test_process_that_was_not_restarted_is_found() -> None:
    role = Role("web", [], starts=2, ends=Counter({-9: 2}))
    (broken,) = judge_roles({"web": role})
    assert isinstance(broken, Broken)
    assert "started 2 times" in broken.what
