"""Audit rows have the same shape from the console, the API and the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select, update

from aijobs.cli import run
from aijobs.operators.models import AuditLog
from aijobs.outbox.models import OutboxEvent, OutboxEventType
from tests.web.console.stage import Console, Stage

Interface = Callable[[str, str], int]


@pytest.fixture
def interfaces(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> dict[str, Interface]:
    """Functions that act through each interface: by a path below /console or /admin-api/ai, or by a command."""
    settings = stage.services.settings
    monkeypatch.setenv("AIJOBS_DATABASE_URL", settings.database_url)
    monkeypatch.setenv("AIJOBS_REDIS_URL", settings.redis_url)
    monkeypatch.setenv("AIJOBS_INSTANCE_PATH", str(settings.instance_path))
    console = stage.client()

    def by_console(address: str, _: str) -> int:
        path = f"/console/{address}"
        return int(console.post(path, console.fields(path, path)).status_code)

    def by_api(address: str, _: str) -> int:
        return int(console.post(f"/admin-api/ai/{address}", **{"X-CSRF-Token": _token(console)}).status_code)

    def by_shell(_: str, command: str) -> int:
        return run(command.split())

    return {"console": by_console, "api": by_api, "shell": by_shell}


def _token(console: Console) -> str:
    return console.fields("/console/jobs", "/console/logout")["csrf_token"]


def _dead(stage: Stage) -> str:
    job_id = stage.succeeded()
    with stage.services.database.transaction() as session:
        event = session.scalars(
            select(OutboxEvent).where(
                OutboxEvent.aggregate_id == job_id, OutboxEvent.event_type == OutboxEventType.COMPLETED
            )
        ).one()
        session.execute(update(OutboxEvent).where(OutboxEvent.id == event.id).values(status="dead"))
        return event.id


ACTIONS: dict[str, tuple[Callable[[Stage], str], str, str]] = {
    "job.retry": (lambda stage: stage.failed(), "jobs/{}/retry", "retry {}"),
    "job.cancel": (lambda stage: stage.queued(), "jobs/{}/cancel", "cancel {}"),
    "outbox.requeue": (_dead, "outbox/{}/requeue", "outbox requeue {}"),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_action_writes_the_same_audit_row_from_console_api_and_shell(
    stage: Stage, interfaces: dict[str, Interface], action: str
) -> None:
    make, address, command = ACTIONS[action]
    shapes = {}
    for name, act in interfaces.items():
        target = make(stage)
        assert act(address.format(target), command.format(target)) in (0, 200, 201, 303), name
        row = _newest(stage, action)
        assert row.target_id == target
        assert (row.operator_id is None, row.remote_addr is None) == (name == "shell",) * 2
        assert row.actor.partition(":")[0] == ("cli" if name == "shell" else "operator")
        shapes[name] = (row.target_type, _shape(row.before), _shape(row.after))
    assert shapes["console"] == shapes["api"] == shapes["shell"]
    assert all(shapes["api"])


def test_refused_action_writes_the_same_audit_row_from_api_and_shell(
    stage: Stage, interfaces: dict[str, Interface]
) -> None:
    for name, act in interfaces.items():
        target = stage.failed()
        if name == "console":  # The console shows no form for an action that would be refused.
            continue
        stage.services.jobs.retry(target, "operator:somebody")
        stage.run(stage.services.monitor.get_job(target).job.retried_as or "")
        assert act(f"jobs/{target}/retry", f"retry {target}") in (409, 1), name
        row = _newest(stage, "job.retry")
        assert (row.target_id, row.after) == (target, {"refused": "JOB_NOT_RETRYABLE"})
        assert set(row.before) == {"lifecycleStatus", "phase", "attempt"}


def test_action_on_an_unknown_target_writes_no_audit_row(stage: Stage, interfaces: dict[str, Interface]) -> None:
    nobody = "01900000-0000-7000-8000-000000000000"
    assert interfaces["api"](f"outbox/{nobody}/requeue", "") == 404
    assert interfaces["console"](f"outbox/{nobody}/requeue", "") == 404
    assert interfaces["shell"]("", f"outbox requeue {nobody}") == 1
    assert interfaces["api"](f"jobs/{nobody}/cancel", "") == 404
    with stage.services.database.read() as session:
        assert set(session.scalars(select(AuditLog.action))) == {"login"}


def _newest(stage: Stage, action: str) -> Any:
    with stage.services.database.read() as session:
        query = select(AuditLog).where(AuditLog.action == action).order_by(AuditLog.at.desc(), AuditLog.id.desc())
        return session.scalars(query).first()


def _shape(values: Any) -> Any:
    """Return names and types of the values; ids differ."""
    return sorted((name, type(value).__name__) for name, value in values.items()) if values is not None else None
