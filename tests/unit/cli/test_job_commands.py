"""`aijobs job`, `cancel`, `retry` and `outbox requeue`, without a broker or a worker."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from sqlalchemy import select, update

from aijobs.jobs.lease import lease_of
from aijobs.jobs.requests import CreateJobInput
from aijobs.operators.models import AuditLog
from aijobs.outbox.models import OutboxEvent, OutboxEventType, OutboxState
from aijobs.wiring.services import Services
from tests.support.rows import add, build_call, build_job, ended

Aijobs = Callable[..., tuple[int, str, str]]
NO_JOB = "01990000-0000-7000-8000-000000000000"


@pytest.fixture
def job_id(services: Services) -> str:
    request = CreateJobInput(
        user_id="ann",
        job_type="synthetic",
        target_type="script",
        target_id="one",
        input={"calls": [{"output": {"said": "SECRET-CANARY"}}]},
    )
    return services.jobs.create_job(request).job.id


def _audit(services: Services) -> list[tuple[str, str, str, object]]:
    with services.database.read() as session:
        rows = session.scalars(select(AuditLog).order_by(AuditLog.id)).all()
    return [(row.action, row.target_id, row.actor.partition(":")[0], row.after) for row in rows]


def test_job_is_shown_with_its_timeline_and_without_its_content(aijobs: Aijobs, job_id: str) -> None:
    code, out, err = aijobs("job", job_id)
    assert (code, err) == (0, "")
    assert f"synthetic {job_id}" in out
    assert "queued (created)" in out
    assert "created           user:ann" in out
    assert "ai.job.enqueue    pending, due" in out
    as_json = aijobs("job", job_id, "--json")[1]
    shown = json.loads(as_json)
    assert shown["job"]["lifecycleStatus"] == "queued"
    assert shown["history"][0]["type"] == "created"
    assert shown["job"]["createdAt"].endswith("Z")
    assert "SECRET-CANARY" not in out + as_json


def test_job_that_lost_workers_shows_charged_losses_and_why_it_runs_alone(
    aijobs: Aijobs, services: Services, job_id: str
) -> None:
    lease = lease_of(services.lifecycle.lock_job(job_id, "worker-1").job)
    services.lifecycle.expire(lease, services.lifecycle.find(job_id).lock_until, at_once=True)  # type: ignore
    services.lifecycle.charge(lease_of(services.lifecycle.lock_job(job_id, "worker-2").job))
    out = aijobs("job", job_id)[1]
    assert "attempt       2 (errors 0 of 2)\n" in out
    assert "lost          own process 1 of 2; shared process 1 (5 in all fail it)\n" in out
    assert "lost workers  Its worker process died while several jobs ran in it. It now runs alone" in out
    assert "Losses of its own process: 1. The job fails at 2.\n" in out
    assert "attempt 1  lease_lost        not charged  reaper\n" in out
    assert "attempt 2  lease_lost        INTERNAL_WORKER_LOST  worker\n" in out


def test_retry_of_a_suspect_shows_the_inherited_loss(aijobs: Aijobs, services: Services, job_id: str) -> None:
    lease = lease_of(services.lifecycle.lock_job(job_id, "worker-1").job)
    services.lifecycle.expire(lease, services.lifecycle.find(job_id).lock_until, at_once=True)  # type: ignore
    services.jobs.cancel(job_id, services.lifecycle.find(job_id).user_id)  # type: ignore
    out = aijobs("job", aijobs("retry", job_id)[1].strip())[1]
    assert "lost          retried job 1 (5 in all fail it)\n" in out
    assert "lost workers  An earlier job of this retry chain lost its worker." in out


def test_job_shows_why_it_waits(aijobs: Aijobs, job_id: str) -> None:
    out = aijobs("job", job_id)[1]
    assert "  because       The broker can't be reached, so no job is sent to workers.\n" in out
    waiting = json.loads(aijobs("job", job_id, "--json")[1])["waiting"]
    assert waiting["reason"] == "broker_away"


def test_job_shows_known_and_unknown_costs_of_its_calls_and_chain(upgraded: Aijobs, services: Services) -> None:
    first = build_job(**ended("failed"))
    retry = build_job(parent_job_id=first.id, root_id=first.id, **ended("succeeded"))
    lost = {"state": "lost", "billed": "unknown", "prompt_tokens": None, "completion_tokens": None, "latency_ms": None}
    add(
        services.database,
        first,
        retry,
        build_call(first, latency_ms=812, http_status=200, request_id="req-1", prompt_tokens=1200, cached_tokens=200),
        build_call(first, call_no=2, cost_micros=None, currency=None, **lost),
        build_call(retry, estimated=True, cost_micros=1_250_000),
    )
    out = upgraded("job", first.id)[1]
    calls = out.partition("Provider calls\n")[2].splitlines()
    assert calls == [
        "  attempt 1.1  local m: done in 812 ms, HTTP 200, 1,200 (200 cached) + 5 tokens, $0.000007, request req-1",
        "  attempt 1.2  local m: lost, cost unknown, possibly billed",
        "  this job     2 calls, 1 failed, 1 lost, 1,200 (200 cached) + 5 tokens, $0.000007, 1 without a price, "
        "1 possibly billed",
        "  whole chain  3 calls, 1 failed, 1 lost, 1,210 (200 cached) + 10 tokens, $1.250007, 1 without a price, "
        "1 estimated, 1 possibly billed",
    ]
    shown = json.loads(upgraded("job", first.id, "--json")[1])
    assert shown["usageTotal"]["costs"] == [{"currency": "USD", "costMicros": 7}]
    assert shown["chainTotal"]["costs"] == [{"currency": "USD", "costMicros": 1_250_007}]
    assert shown["usage"][1]["costMicros"] is None
    assert "waiting" not in shown


@pytest.mark.parametrize("command", ["job", "cancel", "retry"])
@pytest.mark.parametrize("asked", [NO_JOB, "nonsense", "", "a\x00b"])
def test_unknown_job_gives_one_line_and_exit_code_1(upgraded: Aijobs, command: str, asked: str) -> None:
    code, out, err = upgraded(command, asked)
    assert (code, out) == (1, "")
    assert err == "aijobs: JOB_NOT_FOUND: There is no such job\n"


def test_waiting_job_is_cancelled_and_audited(aijobs: Aijobs, services: Services, job_id: str) -> None:
    assert aijobs("cancel", job_id) == (0, f"{job_id} is cancelled\n", "")
    assert _audit(services) == [
        ("job.cancel", job_id, "cli", {"lifecycleStatus": "cancelled", "phase": "cancelled", "attempt": 0})
    ]
    assert aijobs("cancel", job_id) == (0, f"{job_id} is cancelled already\n", "")
    assert json.loads(aijobs("cancel", job_id, "--json")[1])["lifecycleStatus"] == "cancelled"


def test_retry_prints_the_new_job_and_a_repeat_the_same(aijobs: Aijobs, services: Services, job_id: str) -> None:
    code, out, err = aijobs("retry", job_id)
    assert (code, out) == (1, "")
    assert "JOB_NOT_RETRYABLE" in err
    assert "not_final" in err
    assert _audit(services) == [("job.retry", job_id, "cli", {"refused": "JOB_NOT_RETRYABLE"})]
    aijobs("cancel", job_id)
    code, child, _ = aijobs("retry", job_id)
    assert code == 0
    again = json.loads(aijobs("retry", job_id, "--json")[1])
    assert again == {"jobId": child.strip(), "parentJobId": job_id, "created": False}
    assert _audit(services)[-1] == ("job.retry", job_id, "cli", {"childJobId": child.strip(), "created": False})


def test_dead_end_event_is_requeued_and_dead_enqueue_event_is_not(
    aijobs: Aijobs, services: Services, job_id: str
) -> None:
    with services.database.transaction() as session:
        session.execute(update(OutboxEvent).values(status=OutboxState.DEAD))
        enqueue = session.scalars(select(OutboxEvent).where(OutboxEvent.event_type == OutboxEventType.ENQUEUE)).one()
        values = {c.name: getattr(enqueue, c.name) for c in OutboxEvent.__table__.columns}
        end = OutboxEvent(**values | {"id": NO_JOB, "event_type": OutboxEventType.COMPLETED, "dedupe_key": "another"})
        session.add(end)
    assert aijobs("outbox", "requeue", NO_JOB) == (0, f"{OutboxEventType.COMPLETED} {NO_JOB} is pending again\n", "")
    code, out, err = aijobs("outbox", "requeue", enqueue.id)
    assert (code, out) == (1, "")
    assert job_id in err
