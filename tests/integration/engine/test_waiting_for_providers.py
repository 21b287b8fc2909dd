"""Postponed jobs: how long a job waits for an available provider, and what counts as waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from aijobs.ai.calling.gateway import AiGateway
from aijobs.ai.errors import ProvidersBusy
from aijobs.ai.provider import CallFailed
from aijobs.monitor.check import Check
from tests.integration.engine.stage import CARDS, ScriptedProvider, Stage, open_stage
from tests.support.gateways import gateway_to
from tests.support.jobs import Kit

MINUTE = 60
OUTAGE = ProvidersBusy(timedelta(minutes=1))
NO_SLOT = ProvidersBusy(timedelta(seconds=10), crowded=True)
POSTPONED = ["locked", "postponed"]


@dataclass
class ClosableGateway:
    """A gateway that refuses every call while `busy` is set."""

    behind: AiGateway
    busy: ProvidersBusy | None = OUTAGE
    probing: bool = False
    """Whether the job's own call is the probe that fails."""

    def generate(self, request: Any, routes: Any, token: Any, ledger: Any) -> Any:
        if self.busy is not None and self.probing:
            ledger.opened(routes[0])
            ledger.failed(CallFailed("PROVIDER_UNAVAILABLE", "scripted"))
        if self.busy is not None:
            raise self.busy
        return self.behind.generate(request, routes, token, ledger)


@dataclass
class Waiting:
    """A job that waits at most an hour for its provider, and the gateway to that."""

    stage: Stage
    gateway: ClosableGateway
    job_id: str

    @property
    def kit(self) -> Kit:
        return self.stage.kit

    def after(self, minutes: float, busy: ProvidersBusy | None = OUTAGE) -> str:
        """Run the job's next attempt `minutes` later and return the outcome."""
        self.kit.advance(minutes * MINUTE)
        self.gateway.busy = busy
        return self.stage.run(self.job_id)


@contextmanager
def waiting(kit: Kit, *answers: Any, **execution: Any) -> Iterator[Waiting]:
    provider = ScriptedProvider([*answers] or [CARDS])
    gateway = ClosableGateway(gateway_to(provider))
    with open_stage(kit, gateway=gateway) as stage:  # type: ignore[arg-type]
        job_type = stage.asking(CARDS, **{"delay": 1000, "max_retries": 1, **execution})
        yield Waiting(stage, gateway, stage.new_cards(job_type))


@pytest.mark.parametrize("hours", [1.1, 100])
def test_time_in_the_queue_does_not_count_as_waiting_for_a_provider(kit: Kit, hours: float) -> None:
    """An earlier defect: half a minute of an outage ended every job older than an hour."""
    with waiting(kit, max_retries=0) as job:
        assert job.after(hours * 60) == "postponed"
        assert job.after(1) == "postponed"
        assert job.after(58) == "postponed", "59 minutes of an hour"
        assert (kit.job(job.job_id).retry_count, kit.types(job.job_id)) == (0, ["created", *POSTPONED * 3])
        assert job.after(5, None) == "succeeded"


@pytest.mark.parametrize("probing", [False, True])
def test_outage_is_an_error_after_the_patience(kit: Kit, probing: bool) -> None:
    """The call of a probe doesn't restart the patience: a provider's only job would be the probe each time."""
    with waiting(kit) as job:
        job.gateway.probing = probing
        assert [job.after(minutes) for minutes in (90, 30, 29)] == ["postponed"] * 3
        assert job.after(1) == "retry_scheduled"
        assert [job.after(minutes) for minutes in (1, 30, 29)] == ["postponed"] * 3, "the retry waits as long"
        assert job.after(1) == "failed"
        ended = kit.job(job.job_id)
        assert (ended.error_code, ended.retry_count) == ("PROVIDER_UNAVAILABLE", 1)
        codes = {row.error_code for row in kit.history(job.job_id) if row.type == "postponed"}
        assert codes == {"PROVIDER_UNAVAILABLE"}, "the history has the reason"


def test_provider_call_restarts_the_patience(kit: Kit) -> None:
    with waiting(kit, CallFailed("PROVIDER_CONNECTION_LOST", "scripted"), CARDS) as job:
        assert [job.after(0), job.after(50), job.after(5, None)] == ["postponed", "postponed", "retry_scheduled"]
        assert [job.after(10), job.after(55)] == ["postponed"] * 2
        assert job.after(2, None) == "succeeded"


@pytest.mark.parametrize("called", [False, True])
def test_released_attempt_restarts_the_patience_only_if_it_called_a_provider(kit: Kit, called: bool) -> None:
    with waiting(kit, max_retries=0) as job:
        assert job.after(0) == "postponed"
        kit.advance(30 * MINUTE)
        lease = kit.lock(job.job_id)
        if called:
            with kit.database.transaction() as session:
                kit.lifecycle.note_provider_call(session, lease)
        kit.lifecycle.release(lease)
        assert job.after(31) == ("postponed" if called else "failed")


def test_waiting_for_a_free_call_slot_does_not_use_up_the_patience(kit: Kit) -> None:
    """An earlier defect: an hour without a free call slot of an available provider ended jobs as in an outage."""
    with waiting(kit, max_retries=0) as job:
        assert [job.after(50, NO_SLOT) for _ in range(4)] == ["postponed"] * 4
        assert Check(kit.database, kit.clock, None).run().is_sound
        assert {row.error_code for row in kit.history(job.job_id)} == {None}
        assert job.after(1) == "postponed", "the patience starts with the outage"
        assert job.after(59) == "postponed"
        assert job.after(1) == "failed"


def test_wait_for_a_call_slot_ends_an_outage(kit: Kit) -> None:
    with waiting(kit, max_retries=0) as job:
        assert [job.after(0), job.after(30, NO_SLOT), job.after(31)] == ["postponed"] * 3
        assert job.after(61) == "failed"
