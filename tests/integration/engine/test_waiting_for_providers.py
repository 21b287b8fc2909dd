"""A job whose providers are not to be asked waits for them: how long, and what it isn't charged for."""

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
CROWD = ProvidersBusy(timedelta(seconds=10), crowded=True)
PUT_OFF = ["locked", "postponed"]


@dataclass
class Door:
    """A gateway that lets nobody through while `busy` is set."""

    behind: AiGateway
    busy: ProvidersBusy | None = OUTAGE
    probing: bool = False
    """Whether the job's own call is what finds that."""

    def generate(self, request: Any, routes: Any, token: Any, ledger: Any) -> Any:
        if self.busy is not None and self.probing:
            ledger.opened(routes[0])
            ledger.failed(CallFailed("PROVIDER_UNAVAILABLE", "scripted"))
        if self.busy is not None:
            raise self.busy
        return self.behind.generate(request, routes, token, ledger)


@dataclass
class Waiting:
    """A job of a patience of an hour, and the door to its provider."""

    stage: Stage
    door: Door
    job_id: str

    @property
    def kit(self) -> Kit:
        return self.stage.kit

    def after(self, minutes: float, busy: ProvidersBusy | None = OUTAGE) -> str:
        """Run the job's next attempt `minutes` later; the engine's word."""
        self.kit.advance(minutes * MINUTE)
        self.door.busy = busy
        return self.stage.run(self.job_id)


@contextmanager
def waiting(kit: Kit, *answers: Any, **execution: Any) -> Iterator[Waiting]:
    provider = ScriptedProvider([*answers] or [CARDS])
    door = Door(gateway_to(provider))
    with open_stage(kit, gateway=door) as stage:  # type: ignore[arg-type]
        job_type = stage.asking(CARDS, **{"delay": 1000, "max_retries": 1, **execution})
        yield Waiting(stage, door, stage.new_cards(job_type))


@pytest.mark.parametrize("hours", [1.1, 100])
def test_what_a_job_waited_in_a_backlog_is_not_taken_from_its_patience(kit: Kit, hours: float) -> None:
    """Half a minute of an outage ended every job that was older than an hour."""
    with waiting(kit, max_retries=0) as job:
        assert job.after(hours * 60) == "postponed"
        assert job.after(1) == "postponed"
        assert job.after(58) == "postponed", "59 minutes of an hour"
        assert (kit.job(job.job_id).retry_count, kit.types(job.job_id)) == (0, ["created", *PUT_OFF * 3])
        assert job.after(5, None) == "succeeded"


@pytest.mark.parametrize("probing", [False, True])
def test_an_outage_is_an_error_once_the_patience_is_over(kit: Kit, probing: bool) -> None:
    """The probe's call begins no new patience: alone with its provider, a job is the probe each time."""
    with waiting(kit) as job:
        job.door.probing = probing
        assert [job.after(minutes) for minutes in (90, 30, 29)] == ["postponed"] * 3
        assert job.after(1) == "retry_scheduled"
        assert [job.after(minutes) for minutes in (1, 30, 29)] == ["postponed"] * 3, "the retry is as patient"
        assert job.after(1) == "failed"
        ended = kit.job(job.job_id)
        assert (ended.error_code, ended.retry_count) == ("PROVIDER_UNAVAILABLE", 1)
        codes = {row.error_code for row in kit.history(job.job_id) if row.type == "postponed"}
        assert codes == {"PROVIDER_UNAVAILABLE"}, "the history says what kept it back"


def test_a_call_in_between_begins_the_patience_anew(kit: Kit) -> None:
    with waiting(kit, CallFailed("PROVIDER_CONNECTION_LOST", "scripted"), CARDS) as job:
        assert [job.after(0), job.after(50), job.after(5, None)] == ["postponed", "postponed", "retry_scheduled"]
        assert [job.after(10), job.after(55)] == ["postponed"] * 2
        assert job.after(2, None) == "succeeded"


@pytest.mark.parametrize("called", [False, True])
def test_a_stopped_worker_ends_the_wait_only_where_a_provider_was_asked(kit: Kit, called: bool) -> None:
    with waiting(kit, max_retries=0) as job:
        assert job.after(0) == "postponed"
        kit.advance(30 * MINUTE)
        lease = kit.lock(job.job_id)
        if called:
            with kit.database.transaction() as session:
                kit.lifecycle.note_provider_call(session, lease)
        kit.lifecycle.release(lease)
        assert job.after(31) == ("postponed" if called else "failed")


def test_waiting_for_a_free_call_of_a_provider_that_is_well_uses_up_nothing(kit: Kit) -> None:
    """A full hour at the limit of a healthy provider's calls ended jobs as if it had been away."""
    with waiting(kit, max_retries=0) as job:
        assert [job.after(50, CROWD) for _ in range(4)] == ["postponed"] * 4
        assert Check(kit.database, kit.clock, None).run().is_sound
        assert {row.error_code for row in kit.history(job.job_id)} == {None}
        assert job.after(1) == "postponed", "an outage that begins then is a new one"
        assert job.after(59) == "postponed"
        assert job.after(1) == "failed"


def test_an_outage_that_gave_way_to_a_crowd_is_over(kit: Kit) -> None:
    with waiting(kit, max_retries=0) as job:
        assert [job.after(0), job.after(30, CROWD), job.after(31)] == ["postponed"] * 3
        assert job.after(61) == "failed"
