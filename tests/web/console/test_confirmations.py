"""Retry, cancel and requeue: confirmed, permitted, audited, and done once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update

from aijobs.jobs import retries
from aijobs.jobs.models import AiJob, AiJobEvent
from aijobs.operators.models import AuditLog
from aijobs.outbox.models import OutboxEvent
from aijobs.web.console.actions import RETRY
from tests.web.console.stage import Stage, parse


def _audit(stage: Stage, action: str) -> list[AuditLog]:
    with stage.services.database.read() as session:
        return list(session.execute(select(AuditLog).where(AuditLog.action == action).order_by(AuditLog.id)).scalars())


def _everything(stage: Stage) -> dict[str, Any]:
    """Return all values that no GET may change."""
    with stage.services.database.read() as session:
        return {
            "jobs": session.execute(select(AiJob.id, AiJob.lifecycle_status, AiJob.event_seq)).all(),
            "events": session.execute(select(func.count()).select_from(AiJobEvent)).scalar(),
            "outbox": session.execute(select(OutboxEvent.id, OutboxEvent.status)).all(),
            "audit": session.execute(select(func.count()).select_from(AuditLog)).scalar(),
        }


def test_repeated_retry_creates_one_child(stage: Stage) -> None:
    failed = stage.failed()
    console = stage.client()
    address = f"/console/jobs/{failed}/retry"
    form = console.fields(address, address)
    first = console.post(address, {**form, "reason": "provider is back"})
    second = console.post(address, {**form, "reason": "provider is back"})
    assert first.status_code == second.status_code == 303
    assert first.headers["Location"] == second.headers["Location"] != f"/console/jobs/{failed}"
    child = first.headers["Location"].rpartition("/")[2]
    assert stage.job(child).parent_job_id == failed
    assert stage.services.monitor.get_job(failed).job.retried_as == child
    rows = _audit(stage, "job.retry")
    assert [row.actor for row in rows] == ["operator:operator"] * 2
    assert {row.reason for row in rows} == {"provider is back"}
    assert rows[0].after == {"childJobId": child, "created": True}
    assert rows[1].after == {"childJobId": child, "created": False}


def test_retry_leaves_the_old_job_unchanged_and_shows_the_chain(stage: Stage) -> None:
    failed = stage.failed()
    before = {key: value for key, value in vars(stage.job(failed)).items() if key != "_sa_instance_state"}
    console = stage.client()
    address = f"/console/jobs/{failed}/retry"
    child = console.post(address, console.fields(address, address)).headers["Location"]
    assert {key: value for key, value in vars(stage.job(failed)).items() if key != "_sa_instance_state"} == before
    chain = console.soup(child).find(id="job-chain")
    assert len(chain.find_all("li")) == 2
    assert chain.find("a")["href"] == f"/console/jobs/{failed}"
    parent = console.soup(f"/console/jobs/{failed}")
    assert parent.find(id="act-retry")["aria-disabled"] == "true"
    assert child in str(parent.find(id="job-why"))


def test_cancel_ends_a_waiting_job_and_asks_a_running_one_to_stop(stage: Stage) -> None:
    queued, running = stage.queued(), stage.running()
    console = stage.client()
    for job_id, phase in ((queued, "cancelled"), (running, "cancel_requested")):
        address = f"/console/jobs/{job_id}/cancel"
        answer = console.post(address, {**console.fields(address, address), "reason": "asked by the user"})
        assert answer.headers["Location"] == f"/console/jobs/{job_id}"
        soup = console.soup(f"/console/jobs/{job_id}")
        assert soup.find(id="job-head").find(attrs={"data-state": phase})
    assert stage.job(running).cancel_requested_by == "operator:operator"
    assert [row.target_id for row in _audit(stage, "job.cancel")] == [queued, running]


def test_get_changes_nothing(stage: Stage) -> None:
    jobs = stage.each_phase()
    console = stage.client("SUPER_ADMIN")
    console.soup("/console/jobs")
    before = _everything(stage)
    for job_id in jobs.values():
        for end in ("", "/changes", "/retry", "/cancel", "/retry?confirmation=x&reason=y"):
            console.get(f"/console/jobs/{job_id}{end}")
    for address in ("/console/jobs", "/console/outbox", "/console/queues", "/console/workers", "/console/providers"):
        console.get(address)
    for address in ("/console/providers/deepseek/close", "/console/search?q=x"):
        console.get(address)
    assert _everything(stage) == before


@pytest.mark.parametrize("spoiled", ["confirmation", "csrf_token"])
@pytest.mark.parametrize("value", ["", "made-up"])
def test_action_without_its_confirmation_or_csrf_token_is_refused(stage: Stage, spoiled: str, value: str) -> None:
    failed = stage.failed()
    console = stage.client()
    address = f"/console/jobs/{failed}/retry"
    answer = console.post(address, {**console.fields(address, address), spoiled: value})
    assert answer.status_code in (400, 422)
    assert stage.services.monitor.get_job(failed).job.retried_as is None


def test_confirmation_of_another_job_action_or_operator_is_refused(stage: Stage) -> None:
    failed, other, queued = stage.failed(), stage.failed(), stage.queued()
    console, colleague = stage.client(), stage.client("SUPER_ADMIN")
    address = f"/console/jobs/{failed}/retry"
    own = console.fields(address, address)
    foreign = [
        console.fields(f"/console/jobs/{other}/retry", f"/console/jobs/{other}/retry"),
        console.fields(f"/console/jobs/{queued}/cancel", f"/console/jobs/{queued}/cancel"),
        colleague.fields(address, address),
    ]
    for form in foreign:
        answer = console.post(address, {**own, "confirmation": form["confirmation"]})
        assert answer.status_code == 422
        assert parse(answer).find(id="confirm-title")
    assert stage.services.monitor.get_job(failed).job.retried_as is None


@pytest.mark.parametrize("action", ["retry", "cancel"])
def test_role_is_checked_on_the_server(stage: Stage, action: str) -> None:
    job_id = stage.failed() if action == "retry" else stage.queued()
    address = f"/console/jobs/{job_id}/{action}"
    viewer = stage.client("VIEWER")
    assert "Your role does not allow this." in viewer.get(address).text
    form = stage.client().fields(address, address)
    token = viewer.fields("/console/jobs", "/console/logout")
    answer = viewer.post(address, {**form, **token})
    assert answer.status_code == 403
    assert not _audit(stage, f"job.{action}")
    assert stage.job(job_id).lifecycle_status == ("failed" if action == "retry" else "queued")


@pytest.mark.parametrize(
    ("state", "action"),
    [("queued", "retry"), ("running", "retry"), ("succeeded", "retry"), ("failed", "cancel"), ("cancelled", "cancel")],
)
def test_action_that_the_state_forbids_is_refused_with_the_reason(stage: Stage, state: str, action: str) -> None:
    job_id = getattr(stage, state)()
    console = stage.client()
    address = f"/console/jobs/{job_id}/{action}"
    soup = console.soup(address)
    assert soup.find(role="alert").get_text(strip=True)
    assert not soup.find("form", attrs={"action": address})


def test_every_refusal_of_a_retry_has_a_text() -> None:
    refusals = set(re.findall(r'_not_retryable\(\s*"(\w+)"', Path(retries.__file__).read_text(encoding="utf-8")))
    assert len(refusals) > 4
    assert refusals <= set(RETRY.reasons)


def test_retry_of_an_older_job_leads_to_the_newest_of_the_chain(stage: Stage) -> None:
    failed = stage.failed()
    console = stage.client()
    address = f"/console/jobs/{failed}/retry"
    form = console.fields(address, address)
    child = stage.services.jobs.retry(failed, "operator:somebody").job.id
    stage.run(child)
    answer = console.post(address, form)
    assert answer.headers["Location"] == f"/console/jobs/{child}"
    assert "The job was already retried." in console.soup(f"/console/jobs/{child}").find("main").get_text()
    assert _audit(stage, "job.retry")[-1].after == {"refused": "JOB_NOT_RETRYABLE"}


def test_line_break_of_a_browser_counts_as_one_character_of_the_reason(stage: Stage) -> None:
    failed, console = stage.failed(), stage.client()
    address = f"/console/jobs/{failed}/retry"
    reason = "x" * 996 + "\r\nend"
    assert console.post(address, {**console.fields(address, address), "reason": reason}).status_code == 303
    assert [row.reason for row in _audit(stage, "job.retry")] == ["x" * 996 + "\nend"]


def test_reason_is_stored_without_invisible_characters(stage: Stage) -> None:
    failed, console = stage.failed(), stage.client("OPERATOR")
    address = f"/console/jobs/{failed}/retry"
    form = console.fields(address, address)
    assert console.post(address, {**form, "reason": f" \x1b{'x' * 998}\u202e\r\n\x07y "}).status_code == 303
    assert [row.reason for row in _audit(stage, "job.retry")] == ["x" * 998 + "\ny"]


def test_reason_that_is_too_long_is_refused_and_kept_in_the_form(stage: Stage) -> None:
    failed = stage.failed()
    console = stage.client()
    address = f"/console/jobs/{failed}/retry"
    answer = console.post(address, {**console.fields(address, address), "reason": "x" * 1001})
    assert answer.status_code == 422
    soup = parse(answer)
    assert soup.find(id="reason")["aria-invalid"] == "true"
    assert soup.find(id="reason").get_text().strip() == "x" * 1001
    assert "At most 1000 characters." in soup.find("main").get_text()
    assert stage.services.monitor.get_job(failed).job.retried_as is None


def _dead_event(stage: Stage, event_type: str) -> str:
    stage.succeeded()
    with stage.services.database.transaction() as session:
        event = session.execute(select(OutboxEvent).where(OutboxEvent.event_type == event_type)).scalars().first()
        assert event is not None
        session.execute(update(OutboxEvent).where(OutboxEvent.id == event.id).values(status="dead", attempt_count=3))
        return event.id


def test_dead_end_event_is_sent_again_after_a_confirmation(stage: Stage) -> None:
    event_id = _dead_event(stage, "ai.job.completed")
    console = stage.client()
    link = console.soup("/console/outbox?status=dead").find(id=f"act-{event_id}")
    form = console.fields(link["href"], link["href"])
    answer = console.post(link["href"], {**form, "reason": "hook mended"})
    assert answer.headers["Location"] == "/console/outbox"
    assert not console.soup("/console/outbox?status=dead").find(id=f"act-{event_id}")
    (row,) = _audit(stage, "outbox.requeue")
    assert (row.target_id, row.reason, row.after["status"]) == (event_id, "hook mended", "pending")


def test_dead_enqueue_event_cannot_be_sent_again(stage: Stage) -> None:
    event_id = _dead_event(stage, "ai.job.enqueue")
    console = stage.client()
    assert not console.soup("/console/outbox?status=dead").find(id=f"act-{event_id}")
    address = f"/console/outbox/{event_id}/requeue"
    answer = console.post(address, console.fields(address, address))
    assert answer.headers["Location"] == "/console/outbox?status=dead"
    assert (
        "For a dead enqueue event, retry its job."
        in console.soup("/console/outbox?status=dead").find("main").get_text()
    )


def test_unknown_event_is_not_found(stage: Stage) -> None:
    console = stage.client()
    assert console.get("/console/outbox/nope/requeue").status_code == 404
    address = "/console/outbox/01900000-0000-7000-8000-000000000000/requeue"
    assert console.post(address, console.fields(address, address)).status_code == 404


def test_viewer_cannot_send_an_event_again(stage: Stage) -> None:
    event_id = _dead_event(stage, "ai.job.completed")
    viewer = stage.client("VIEWER")
    address = f"/console/outbox/{event_id}/requeue"
    answer = viewer.post(address, viewer.fields("/console/jobs", "/console/logout"))
    assert answer.status_code == 403
    assert not _audit(stage, "outbox.requeue")
