"""The judge itself: sound evidence is left alone, and each kind of broken promise is found."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from aijobs.ai.models import AiUsageLog
from aijobs.jobs.models import AiJob, AiJobEvent
from aijobs.outbox.models import OutboxEvent
from tests.chaos.driver import Book
from tests.chaos.evidence import Evidence
from tests.chaos.ledger import Call
from tests.chaos.plan import CHAOS, Action, Create, Script
from tests.chaos.stage import Role
from tests.chaos.verdict import Broken, judge, judge_roles
from tests.support.rows import build_call, build_event, build_history, build_job, ended

OK = Script("quick", ({"sleep_ms": 1},))
CREATE = Create(0, CHAOS, "u1", "key-0", OK, 2, 40)


class Case:
    """One create and its job, which succeeded with two items for one provider call."""

    def __init__(self, create: Create = CREATE) -> None:
        self.job = self.add_job(artifact_count=2, **ended("succeeded"))
        self.usage = build_call(self.job, id="usage-1")
        self.call = Call("usage-1", self.job.id, 1, asked=1, answered=1)
        self.book = Book()
        told = self.book.of(create)
        told.job_ids, told.made, told.chain = [self.job.id], 1, [self.job.id]
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

    @staticmethod
    def add_job(**fields: Any) -> AiJob:
        """A job of the create, with the counters that the database would have filled in."""
        counters = {"retry_count": 0, "lost_count": 0, "artifact_count": 0}
        return build_job(job_type=CHAOS, target_id=CREATE.target_id, **{**counters, **fields})

    def judge(self, *, database_faults: bool = False) -> list[str]:
        """What is found broken."""
        evidence = Evidence(self.jobs, self.history, self.rows, self.events, self.artifacts, self.cards, self.calls)
        return [broken.what for broken in judge(evidence, self.book, database_faults=database_faults)]

    def fail(self, code: str, **fields: Any) -> None:
        """Let the job have failed without a result."""
        self.job.lifecycle_status, self.job.error_code, self.job.artifact_count = "failed", code, 0
        self.artifacts, self.cards = {}, {}
        for name, value in fields.items():
            setattr(self.job, name, value)


def test_sound_evidence_is_left_alone() -> None:
    assert Case().judge() == []


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
    "told two jobs": (lambda c: c.book.of(CREATE).job_ids.append("x"), "answered with several jobs"),
    "made twice": (lambda c: setattr(c.book.of(CREATE), "made", 2), "told that they made it"),
    "lost job": (lambda c: setattr(c.book.of(CREATE), "job_ids", ["x"]), "a job that is not there"),
    "lost retry": (lambda c: c.book.of(CREATE).chain.append("x"), "a retry was told a job that is not there"),
    "unasked job": (lambda c: setattr(c.job, "target_id", "c9"), "nobody asked for"),
    "result twice": (lambda c: c.cards.update({c.job.id: 4}), "4 business rows instead of 2"),
    "artifact lost": (lambda c: c.artifacts.clear(), "0 artifacts instead of 2"),
    "failed unasked": (lambda c: c.fail("INTERNAL_ERROR"), "failed with INTERNAL_ERROR"),
    "lost too early": (lambda c: c.fail("INTERNAL_WORKER_LOST", lost_count=1), "failed with INTERNAL_WORKER_LOST"),
    "not dispatched": (lambda c: c.fail("INTERNAL_NOT_DISPATCHED"), "failed with INTERNAL_NOT_DISPATCHED"),
    "rest of a result": (
        lambda c: (c.fail("INTERNAL_WORKER_LOST", lost_count=2), c.cards.update({c.job.id: 1})),
        "is failed with 1 business rows instead of 0",
    ),
    "bought again": (_ask_again_after_saving, "saved its answer at attempt 1 and asked again"),
    "answer left lying": (_unsaved_answer, "that nobody saved or gave up"),
    "call without row": (lambda c: c.rows.clear(), "a provider call without its usage row"),
    "two calls, one row": (lambda c: setattr(c.call, "asked", 2), "2 calls on one usage row"),
    "open row": (lambda c: setattr(c.usage, "state", "started"), "never closed"),
    "row without answer": (lambda c: setattr(c.call, "answered", 0), "done without an answer"),
    "row without call": (lambda c: c.calls.clear(), "is done without an answer"),
    "zombie": (_zombie_wrote, "has succeeded of attempt 1 from another than its holder"),
    "surprise": (lambda c: c.book.surprise(Action(0, "cancel", CREATE), "HTTP 418"), "HTTP 418"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_promise_is_found(name: str) -> None:
    breaks, says = BREAKS[name]
    case = Case()
    breaks(case)
    assert any(says in what for what in case.judge()), case.judge()


def test_what_a_script_or_enough_lost_workers_explain_is_no_broken_promise() -> None:
    lost = Case()
    lost.fail("INTERNAL_WORKER_LOST", lost_count=2)
    assert lost.judge() == []
    create = Create(0, CHAOS, "u1", "key-0", Script("blocked", (), "CONTENT_SAFETY_BLOCKED"), 2, 40)
    scripted = Case(create)
    scripted.fail("CONTENT_SAFETY_BLOCKED")
    assert scripted.judge() == []


def test_a_database_that_went_away_explains_its_own_code_at_the_second_time_only() -> None:
    case = Case()
    case.fail("INTERNAL_DATABASE")
    assert case.judge(database_faults=True)
    case.history[case.job.id].append(
        AiJobEvent(job_id=case.job.id, type="retry_scheduled", attempt_no=1, error_code="INTERNAL_DATABASE")
    )
    assert case.judge(database_faults=True) == []
    assert case.judge(database_faults=False)


def test_a_process_that_was_not_started_again_is_found() -> None:
    role = Role("web", [], starts=2, ends=Counter({-9: 2}))
    (broken,) = judge_roles({"web": role})
    assert isinstance(broken, Broken)
    assert "started 2 times" in broken.what
