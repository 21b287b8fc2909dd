"""`aijobs check`: its findings, and the rules that it leaves out."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import pytest
from sqlalchemy import update

from aijobs.clock import utc_now
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreateJobInput
from aijobs.monitor.check import LOST_MESSAGE
from aijobs.monitor.check_rules import RULES, UNSENT
from aijobs.outbox.models import OutboxEvent
from aijobs.wiring.services import Services

Aijobs = Callable[..., tuple[int, str, str]]


@pytest.fixture
def job_id(services: Services) -> str:
    request = CreateJobInput(
        user_id="ann", job_type="synthetic", target_type="script", target_id="one", input={"calls": [{"output": {}}]}
    )
    return services.jobs.create_job(request).job.id


def _change(services: Services, table: type, **values: object) -> None:
    with services.database.transaction() as session:
        session.execute(update(table).values(**values))


def test_unsent_events_during_a_broker_outage_do_not_fail_the_check(
    aijobs: Aijobs, services: Services, job_id: str
) -> None:
    _change(services, OutboxEvent, available_at=utc_now() - timedelta(hours=1))
    code, out, err = aijobs("check")
    assert (code, err) == (0, "")
    assert out.startswith(f"All promises hold (1 jobs, {len(RULES) - 1} rules, ")
    left_out = "; the broker doesn't answer, so events that wait for it and lost messages were not looked for)."
    assert out.rstrip().endswith(left_out)
    code, out, _ = aijobs("check", "--json")
    report = json.loads(out)
    assert (code, report["isSound"], report["broker"]) == (0, True, "away")
    assert report["leftOut"] == [UNSENT.what, LOST_MESSAGE]


def test_expired_lease_is_a_finding_only_after_the_configured_grace_time(
    aijobs: Aijobs, services: Services, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    services.lifecycle.lock_job(job_id, "worker-1")
    _change(services, AiJob, lock_until=utc_now() - timedelta(seconds=200))
    code, out, _ = aijobs("check")
    assert (code, job_id in out) == (1, True)
    monkeypatch.setenv("AIJOBS_LEASE_GRACE_S", "600")
    assert aijobs("check")[0] == 0
