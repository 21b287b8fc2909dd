"""Untrusted text is shown as text in every field of every page."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import update

from aijobs.ai.models import AiUsageLog
from aijobs.clock import utc_now
from aijobs.jobs.models import AiJobArtifact, AiJobEvent, AiJobSnapshot
from aijobs.operators.models import AuditLog, Operator
from aijobs.outbox.models import OutboxEvent
from aijobs.queues.presence import Presence
from tests.web.console.stage import Stage, parse

# Short enough for columns of 64 characters; each breaks out of a different context.
PAYLOADS = (
    "'\"><img src=x onerror=alert(1) class=hostile>{{7*7}}",
    '" autofocus onfocus=alert(1) class="hostile',
    "' onmouseover=alert(1) class='hostile",
    "</script></textarea></title><b class=hostile>{% raw %}",
)
UNCLOSED = "<iframe src=//x.example class=hostile <script src=//x.example class=hostile "
MORE = (UNCLOSED, "javascript:alert('hostile')", "<template><p class=hostile hx-get=/console/jobs hx-trigger=load>")


@pytest.mark.parametrize("payload", [*PAYLOADS, UNCLOSED])
def test_hostile_text_in_any_field_is_shown_as_text(stage: Stage, payload: str) -> None:
    jobs = _poison(stage, payload)
    console = stage.client("SUPER_ADMIN")
    addresses = ["/console/jobs", "/console/outbox", "/console/queues", "/console/workers", "/console/outbox/changes"]
    addresses += ["/console/providers", "/console/providers/deepseek/close"]
    _poison_audit(stage, payload)
    addresses.append("/console/audit")
    for job_id in jobs:
        addresses += [f"/console/jobs/{job_id}{end}" for end in ("", "/changes", "/retry", "/cancel")]
    addresses.append("/console/jobs/changes?ids=" + ",".join(jobs))
    for address in addresses:
        answer = console.get(address)
        assert answer.status_code == 200, address
        assert answer.headers["Content-Type"].startswith("text/html")
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        _assert_clean(answer, address)
    assert payload in console.soup(f"/console/jobs/{jobs[0]}").find(id="job-head").get_text()


@pytest.mark.parametrize("payload", [*PAYLOADS, *MORE])
def test_hostile_text_in_an_address_is_shown_as_text(stage: Stage, payload: str) -> None:
    stage.queued()
    console = stage.client()
    for name in ("q", "userId", "jobType", "errorCode", "createdFrom", "cursor", "lifecycleStatus", "queueName"):
        _assert_clean(console.http.get("/console/jobs", query_string={name: payload}), name)
    for name in ("status", "eventType", "cursor"):
        _assert_clean(console.http.get("/console/outbox", query_string={name: payload}), name)
    _assert_clean(console.http.get("/console/login", query_string={"next": payload}), "next")
    search = console.http.get("/console/search", query_string={"q": payload})
    assert search.headers["Location"].startswith("/console/jobs?")
    _assert_clean(console.http.get(search.headers["Location"]), "search")


def _assert_clean(answer: object, where: str) -> None:
    soup = parse(answer)
    assert not soup.find(class_="hostile"), where
    for element in soup.find_all(True):
        assert not any(name.startswith("on") for name in element.attrs), (where, element)
        assert not str(element.get("href", "")).startswith("javascript"), (where, element)
        assert element.name not in ("img", "iframe"), where


def _poison(stage: Stage, payload: str) -> list[str]:
    """Put the payload into every text column of jobs in three phases; return their ids."""
    jobs = [stage.failed(), stage.running(), stage.cancel_requested()]
    with stage.services.database.transaction() as session:
        session.execute(update(Operator).where(Operator.role == "SUPER_ADMIN").values(language="en"))
    for job_id in jobs:
        stage.set_job(
            job_id,
            user_id=payload,
            target_type=payload[:64],
            target_id=payload,
            error_code=payload[:64] if job_id == jobs[0] else None,
            public_error_message=payload,
            internal_error_message=payload,
            prompt_version=payload[:32],
            input_schema_version=payload[:32],
            output_schema_version=payload[:32],
            output_hash=payload[:64],
            credential_mode=payload[:32],
            trigger_type=payload[:16],
            cancel_requested_by=payload,
            idempotency_key=payload + job_id,
        )
        if job_id == jobs[2]:
            stage.set_job(job_id, locked_by=payload, lock_until=utc_now() + timedelta(minutes=5))
        _poison_children(stage, job_id, payload)
    stage.set_job(stage.queued(), job_type="hostile_type")
    stage.pause("ai-background", payload)
    worker = Presence(stage.services.broker.client, stage.instance, payload)
    worker.started(jobs[1])
    return jobs


def _poison_children(stage: Stage, job_id: str, payload: str) -> None:
    with stage.services.database.transaction() as session:
        session.execute(
            update(AiJobEvent)
            .where(AiJobEvent.job_id == job_id)
            .values(actor=payload, instance=payload, error_code=payload[:64])
        )
        session.execute(
            update(OutboxEvent).where(OutboxEvent.aggregate_id == job_id).values(last_error=payload, locked_by=payload)
        )
        session.execute(
            update(AiJobSnapshot)
            .where(AiJobSnapshot.job_id == job_id)
            .values(schema_version=payload[:32], content_hash=payload[:64], redaction_version=payload[:16])
        )
        session.add(AiJobArtifact(job_id=job_id, artifact_type=payload[:64], artifact_id=payload[:64], ordinal=0))
        session.add(
            AiUsageLog(
                job_id=job_id,
                attempt_no=1,
                call_no=1,
                user_id=payload,
                state="failed",
                provider=payload[:64],
                model=payload,
                credential_mode=payload[:32],
                currency="<b>",
                cost_micros=1,
                billed="<i>",
                finish_reason=payload[:32],
                error_code=payload[:64],
                estimated=True,
                started_at=utc_now(),
            )
        )


def _poison_audit(stage: Stage, payload: str) -> None:
    with stage.services.database.transaction() as session:
        session.add(
            AuditLog(
                actor=payload,
                action=payload,
                target_type="job",
                target_id=payload,
                reason=payload,
                before={payload: payload},
                after={"x": [payload]},
                remote_addr=payload,
                user_agent=payload,
                at=utc_now(),
            )
        )
