"""PROJECT: business rows, artifacts, success and end event are one transaction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from aijobs.db.database import CommitUnknown
from aijobs.definitions.definition import MOST_LOSSES
from aijobs.definitions.projector import Artifact
from aijobs.job_types.flashcard_generation import FlashcardProjector
from aijobs.jobs.errors import LifecycleError
from aijobs.jobs.lease import lease_of
from aijobs.jobs.models import AiJobArtifact
from aijobs.jobs.status import FINAL
from tests.integration.engine.stage import CARDS, Stage, Writing, card_row, failing_statement, open_stage, saved_job
from tests.support.databases import ANY_DATABASE, OTHERS_LATER
from tests.support.jobs import BEGIN, Kit, race


def _nothing_is_left(stage: Stage, job_id: str) -> None:
    assert stage.kit.rows("flashcards") == []
    assert stage.kit.rows("ai_job_artifacts") == []
    assert [event.event_type for event in stage.kit.events(job_id)] != ["ai.job.completed"]
    assert stage.kit.job(job_id).artifact_count == 0
    assert stage.kit.job(job_id).lifecycle_status != "succeeded"


@ANY_DATABASE
def test_cards_are_stored_in_the_order_of_the_output(stage: Stage) -> None:
    job_id = stage.new_cards(stage.asking(CARDS))
    assert stage.run(job_id) == "succeeded"
    cards = sorted(stage.kit.rows("flashcards", job_id=job_id), key=lambda card: card["ordinal"])
    output = stage.kit.row(job_id)["validated_output"]
    assert [card["card_type"] for card in cards] == [card["card_type"] for card in output["cards"]]
    artifacts = sorted(stage.kit.rows("ai_job_artifacts", job_id=job_id), key=lambda a: a["ordinal"])
    assert [(a["artifact_type"], a["artifact_id"]) for a in artifacts] == [("Flashcard", c["id"]) for c in cards]
    assert stage.kit.job(job_id).artifact_count == 2


def test_second_projection_returns_the_same_cards(stage: Stage) -> None:
    job_id = stage.new_cards(stage.asking(CARDS))
    stage.run(job_id)
    before = stage.kit.rows("flashcards")
    projector = FlashcardProjector()
    output = stage.kit.row(job_id)["validated_output"]
    job = stage.kit.job(job_id)
    again = stage.kit.database.write(lambda s: projector.project(s, job, output))
    recorded = stage.kit.rows("ai_job_artifacts", job_id=job_id)
    assert {(a.artifact_type, a.artifact_id, a.ordinal) for a in again.artifacts} == {
        (a["artifact_type"], a["artifact_id"], a["ordinal"]) for a in recorded
    }
    assert stage.kit.rows("flashcards") == before


@ANY_DATABASE
def test_two_jobs_with_equal_answers_have_separate_cards(stage: Stage) -> None:
    job_type = stage.asking(CARDS)
    first, second = stage.new_cards(job_type), stage.new_cards(job_type)
    assert [stage.run(first), stage.run(second)] == ["succeeded", "succeeded"]
    assert len(stage.kit.rows("flashcards", job_id=first)) == 2
    assert len(stage.kit.rows("flashcards", job_id=second)) == 2


def test_error_at_any_statement_rolls_back_the_whole_projection(stage: Stage) -> None:
    stage.engine.close()
    with failing_statement(stage.kit, 0, RuntimeError) as seen:
        assert stage.run(saved_job(stage)) == "succeeded"
    whole = len(seen)
    assert whole > 5
    for number in range(1, whole + 1):
        # Later assertions read only this job's rows.
        job_id = saved_job(stage)
        run = stage.engine._prepare.take(stage.message(job_id))
        assert run is not None
        with failing_statement(stage.kit, number, lambda: RuntimeError("injected")) as seen, suppress(Exception):
            stage.engine._attempts._project.project(run)
        if len(seen) < number:
            break
        assert stage.kit.rows("flashcards", job_id=job_id) == []
        assert stage.kit.rows("ai_job_artifacts", job_id=job_id) == []
        assert stage.kit.events(job_id, "ai.job.completed") == []
        job = stage.kit.job(job_id)
        assert (job.lifecycle_status, job.artifact_count) == ("running", 0)
        assert stage.kit.types(job_id)[-1] == "locked"
    else:
        raise AssertionError("no projection succeeded")
    assert number > 5, "every statement of the projection failed once"
    assert stage.kit.job(job_id).lifecycle_status == "succeeded"


@pytest.mark.parametrize("where", ["before", "after"])
def test_raising_projector_leaves_no_rows_and_fails_the_job_after_one_retry(stage: Stage, where: str) -> None:
    def project(session: Session, job: Any) -> None:
        if where == "after":
            session.add(card_row(job.id, 0))
            session.flush()
        raise ValueError("cannot project")

    job_id = saved_job(stage, Writing(project))
    job = stage.run_to_end(job_id)
    assert (job.lifecycle_status, job.error_code) == ("failed", "INTERNAL_PROJECTION")
    assert stage.kit.types(job_id).count("locked") == 1 + 2
    _nothing_is_left(stage, job_id)


def test_projected_value_that_a_column_refuses_fails_the_job_after_one_retry(stage: Stage) -> None:
    def project(session: Session, job: Any) -> None:
        card = card_row(job.id, 0)
        card.source_title = None  # type: ignore[assignment]
        session.add(card)

    job_id = saved_job(stage, Writing(project))
    job = stage.run_to_end(job_id)
    assert (job.error_code, job.retry_count) == ("INTERNAL_PROJECTION", 1)
    _nothing_is_left(stage, job_id)


def _job_that_was_projected_before(stage: Stage) -> str:
    def project(session: Session, job: Any) -> list[Artifact]:
        session.add(card_row(job.id, 0, "written again"))
        session.flush()
        raise AssertionError("unreachable")

    job_id = saved_job(stage, Writing(project))
    with stage.kit.database.transaction() as session:
        session.add(card_row(job_id, 0))
        session.add(AiJobArtifact(job_id=job_id, artifact_type="Flashcard", artifact_id="card-1", ordinal=0))
    return job_id


def test_unique_conflict_of_a_job_with_artifacts_is_a_success(stage: Stage, log_lines: Any) -> None:
    job_id = _job_that_was_projected_before(stage)
    assert stage.run(job_id) == "succeeded"
    assert stage.kit.job(job_id).artifact_count == 1
    assert [row["artifact_id"] for row in stage.kit.rows("ai_job_artifacts")] == ["card-1"]
    assert [card["front"] for card in stage.kit.rows("flashcards")] == ["a card"]
    assert [line["jobId"] for line in log_lines() if "{{##duplicate}}" in line["event"]] == [job_id]


def _ask_to_cancel(stage: Stage, job_id: str) -> None:
    stage.kit.lifecycle.request_cancel(job_id, "user:u1")


def _take_over(stage: Stage, job_id: str) -> None:
    job = stage.kit.job(job_id)
    assert job.lock_until is not None
    stage.kit.lifecycle.expire(lease_of(job), job.lock_until)


@pytest.mark.parametrize(
    ("between", "outcome", "types"),
    [(_ask_to_cancel, "cancelled", ["cancel_requested", "cancelled"]), (_take_over, "lost", ["lease_lost"])],
)
def test_cancel_or_takeover_after_a_unique_conflict_wins(
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    between: Callable[[Stage, str], None],
    outcome: str,
    types: list[str],
) -> None:
    job_id = _job_that_was_projected_before(stage)
    transactions, succeed = [], stage.engine._attempts._project._succeed

    def one_transaction(*arguments: Any) -> Any:
        transactions.append(arguments)
        if len(transactions) == 2:
            between(stage, job_id)
        return succeed(*arguments)

    monkeypatch.setattr(stage.engine._attempts._project, "_succeed", one_transaction)
    before = stage.kit.types(job_id)
    assert stage.run(job_id) == outcome
    assert len(transactions) == 2
    assert stage.kit.types(job_id) == [*before, "locked", *types]
    assert stage.kit.job(job_id).artifact_count == 0


def test_conflict_of_an_artifact_row_is_a_success(stage: Stage) -> None:
    job_id = saved_job(stage, Writing(lambda session, job: [Artifact("Thing", "t1", 0), Artifact("Thing", "t2", 1)]))
    with stage.kit.database.transaction() as session:
        session.add(AiJobArtifact(job_id=job_id, artifact_type="Thing", artifact_id="t1", ordinal=0))
    assert stage.run(job_id) == "succeeded"
    assert stage.kit.job(job_id).artifact_count == len(stage.kit.rows("ai_job_artifacts", job_id=job_id)) == 1


def test_unique_conflict_of_a_job_without_artifacts_is_a_failure(stage: Stage) -> None:
    def project(session: Session, job: Any) -> list[Artifact]:
        session.add(card_row("another-job", 0))
        session.flush()
        return []

    with stage.kit.database.transaction() as session:
        session.add(card_row("another-job", 0))
    job_id = saved_job(stage, Writing(project))
    job = stage.run_to_end(job_id)
    assert (job.error_code, job.retry_count) == ("INTERNAL_PROJECTION", 1)
    assert len(stage.kit.rows("flashcards")) == 1


@ANY_DATABASE
def test_projector_that_returns_an_artifact_twice_fails_the_job(stage: Stage) -> None:
    job_id = saved_job(stage, Writing(lambda session, job: [Artifact("Thing", "t1", 0), Artifact("Thing", "t1", 1)]))
    job = stage.run_to_end(job_id)
    assert (job.lifecycle_status, job.error_code) == ("failed", "INTERNAL_PROJECTION")
    _nothing_is_left(stage, job_id)


@ANY_DATABASE
def test_success_whose_commit_answer_is_lost_is_a_success(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = saved_job(stage)
    once, lost = stage.kit.database._once, []

    def lossy(*work: Any) -> Any:
        result = once(*work)
        if not lost and stage.kit.job(job_id).lifecycle_status == "succeeded":
            lost.append(1)
            raise CommitUnknown(OperationalError("COMMIT", {}, Exception("gone"), connection_invalidated=True))
        return result

    monkeypatch.setattr(stage.kit.database, "_once", lossy)
    assert stage.run(job_id) == "succeeded"
    assert lost == [1]
    assert stage.kit.types(job_id)[-2:] == ["locked", "succeeded"]
    assert len(stage.kit.rows("flashcards", job_id=job_id)) == 2
    assert len(stage.kit.events(job_id, "ai.job.completed")) == 1


def test_row_values_are_not_in_the_internal_message(stage: Stage) -> None:
    """A database error quotes the value, which is content; only a reveal may show that."""

    def project(session: Any, job: Any) -> None:
        for number in range(2):
            card = card_row(job.id, 0, "canary-front")
            card.id, card.user_id = "canary-id", f"canary-user-{number}"
            session.add(card)
            session.flush()

    job = stage.run_to_end(saved_job(stage, Writing(project)))
    assert job.error_code == "INTERNAL_PROJECTION"
    text = stage.kit.row(job.id)["internal_error_message"]
    assert "canary" not in text
    assert "sqlalchemy.exc.IntegrityError (" in text
    assert "in project" in text, "the stack is there"
    codes = {"sqlite": "SQLITE_CONSTRAINT", "postgresql": "sqlstate 23505", "mysql": "errno 1062"}
    assert codes[stage.kit.database.engine.dialect.name] in text


# --- concurrent reaper -----------------------------------------------------------------------------------------------


@OTHERS_LATER
def test_projection_beside_a_reaper_leaves_no_cards_of_a_failed_job(live_kit: Kit) -> None:
    """The job may lose no other lease, so either transaction ends it."""
    kit, winners = live_kit, set()
    with open_stage(kit) as stage:
        for number in range(60):
            job_id = saved_job(stage)
            run = stage.engine._prepare.take(stage.message(job_id))
            assert run is not None
            kit.set(job_id, lock_until=BEGIN, uncharged_losses=MOST_LOSSES)

            def project(run: Any = run) -> Any:
                return stage.engine._attempts._project.project(run)

            def reap(run: Any = run) -> Any:
                return kit.lifecycle.expire(run.lease, BEGIN)

            ahead = number % 9 - 4
            outcomes = race(_after_reads(kit, job_id, ahead, project), _after_reads(kit, job_id, -ahead, reap))
            assert [isinstance(one, LifecycleError) for one in outcomes].count(True) == 1, outcomes
            ended = _one_end(kit, job_id)
            winners.add(ended["lifecycle_status"])
            for late in (project, reap):
                with pytest.raises(LifecycleError):
                    late()
            assert stage.run(job_id) == "not_taken"
            assert _one_end(kit, job_id) == ended, "a later write changes nothing"
    assert winners == {"succeeded", "failed"}, "each was first in some races"


def _after_reads(kit: Kit, job_id: str, reads: int, work: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that delays `work` by so many reads of the job."""

    def late() -> Any:
        for _ in range(reads):
            kit.job(job_id)
        return work()

    return late


def _one_end(kit: Kit, job_id: str) -> dict[str, Any]:
    """Return the row of a job after checking that all other rows agree with its one end."""
    row = kit.row(job_id)
    status = row["lifecycle_status"]
    assert [one for one in kit.types(job_id) if one in FINAL] == [status]
    end_events = [event.event_type for event in kit.events(job_id) if event.event_type != "ai.job.enqueue"]
    assert end_events == [{"succeeded": "ai.job.completed", "failed": "ai.job.failed"}[status]]
    artifacts, cards = kit.rows("ai_job_artifacts", job_id=job_id), kit.rows("flashcards", job_id=job_id)
    assert (status == "succeeded") == bool(artifacts) == bool(cards)
    assert row["artifact_count"] == len(artifacts) == len(cards)
    errors = [row[name] for name in ("error_code", "public_error_message", "internal_error_message")]
    assert errors == [None] * 3 if status == "succeeded" else errors[0] == "INTERNAL_WORKER_LOST"
    assert (row["locked_by"], row["lock_until"], row["next_attempt_at"]) == (None, None, None)
    return row
