"""The reads of API and console. Each method opens one reading session, and runs at most 8 statements."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from aijobs.ai.calling.breaker import BreakerState
from aijobs.db.clock import Clock
from aijobs.db.database import Database
from aijobs.definitions.registry import JobDefinitionRegistry
from aijobs.errors import ApiError
from aijobs.jobs.models import PASSES
from aijobs.monitor.filters import JobFilter
from aijobs.monitor.jobs import JobReads
from aijobs.monitor.keyset import DEFAULT_LIMIT, Cursors, Page
from aijobs.monitor.outbox import OutboxReads
from aijobs.monitor.passes import read_passes
from aijobs.monitor.providers import ProviderReads
from aijobs.monitor.queues import QueueReads
from aijobs.monitor.usage import find_groups
from aijobs.monitor.usage_filter import UsageFilter
from aijobs.monitor.views import (
    Count,
    JobDetail,
    JobRow,
    JobView,
    OutboxRow,
    OutboxStatus,
    PassRow,
    Providers,
    QueueStatus,
    Revealed,
    Usage,
    Wait,
    Workers,
)
from aijobs.monitor.waits import find_wait, was_postponed
from aijobs.monitor.workers import BrokerProbe, PresenceSource, WorkerReads
from aijobs.queues.state import BrokerState
from aijobs.settings import Settings

_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def is_id(text: str) -> bool:
    """Return whether `text` has the form of our ids. Nothing else is looked up."""
    return _ID.fullmatch(text) is not None


class Monitor:
    """Reads for people. `find_` may return None; `get_` raises `ApiError`."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        clock: Clock,
        registry: JobDefinitionRegistry,
        broker: BrokerProbe,
        presence: PresenceSource,
        providers: ProviderReads,
    ) -> None:
        self._database, self._clock, self._registry = database, clock, registry
        self._lease_grace = settings.seconds("lease_grace")
        cursors = Cursors(settings.secret_key)
        self._jobs = JobReads(clock, registry, cursors)
        self._outbox = OutboxReads(clock, cursors)
        late_after_s = 2 * settings.heartbeat_s
        self._queues = QueueReads(clock, broker, presence, late_after_s)
        self._providers, self._broker = providers, broker
        self._workers = WorkerReads(broker, presence, late_after_s)

    # --- a user's own jobs -------------------------------------------------------------------------------------

    def find_own_job(self, user_id: str, job_id: str) -> JobView | None:
        """Return the user's job; None for another user's and for none, by the same statement."""
        if not is_id(job_id):
            return None
        with self._database.read() as session:
            return self._jobs.find_view(session, job_id, user_id)

    def list_own_jobs(
        self, user_id: str, wanted: JobFilter, cursor: str | None = None, limit: int = DEFAULT_LIMIT
    ) -> Page[JobView]:
        """Return the user's jobs, newest first. `InputInvalid` for a cursor that isn't this user's."""
        own = replace(wanted, user_id=user_id)
        with self._database.read() as session:
            return self._jobs.find_view_page(session, own, cursor, limit, scope=f"own:{user_id}")

    # --- jobs as operators see them ----------------------------------------------------------------------------

    def list_jobs(self, wanted: JobFilter, cursor: str | None = None, limit: int = DEFAULT_LIMIT) -> Page[JobRow]:
        """Return jobs, newest first. `InputInvalid` for a cursor of another list."""
        with self._database.read() as session:
            return self._jobs.find_page(session, wanted, cursor, limit, scope="jobs")

    def find_rows(self, job_ids: Collection[str]) -> tuple[JobRow, ...]:
        """Return those of these jobs that exist, for a list that is being watched."""
        with self._database.read() as session:
            return self._jobs.find_rows(session, job_ids)

    def count_jobs(self, wanted: JobFilter) -> dict[str, Count]:
        """Return capped counts by lifecycle status, of what `wanted` selects without its own status."""
        with self._database.read() as session:
            return self._jobs.count_by_status(session, wanted)

    def find_job(self, job_id: str) -> JobView | None:
        """Return a job of any user, or None."""
        if not is_id(job_id):
            return None
        with self._database.read() as session:
            return self._jobs.find_view(session, job_id)

    def get_job(self, job_id: str) -> JobView:
        """Return a job of any user; `JOB_NOT_FOUND`."""
        view = self.find_job(job_id)
        if view is None:
            raise ApiError("JOB_NOT_FOUND")
        return view

    def get_detail(self, job_id: str, *, internal: bool = False) -> JobDetail:
        """Return everything of a job except its content. `internal`: with the internal error message.
        `JOB_NOT_FOUND`.
        """
        detail = None
        if is_id(job_id):
            with self._database.read() as session:
                detail = self._jobs.find_detail(session, job_id, internal=internal)
        if detail is None:
            raise ApiError("JOB_NOT_FOUND")
        return detail

    def find_wait(self, detail: JobDetail) -> Wait | None:
        """Return why a job waits or runs, by its queue and the breakers of its providers; None if it has ended."""
        job, queue = detail.job, None
        breakers: tuple[BreakerState, ...] = ()
        if not job.final and job.locked_by is None:
            queue = next((q for q in self.queue_statuses() if q.queue_name == job.queue_name), None)
            definition = self._registry.find(job.job_type)
            if definition is not None and was_postponed(detail):
                breakers = self._providers.find_keeping_back(definition, job.credential_mode, detail.credential_id)
        return find_wait(detail, queue, breakers, self._lease_grace)

    def reveal(self, job_id: str) -> Revealed:
        """Return a job's input and output. The caller has checked the right and written the audit row.
        `JOB_NOT_FOUND`.
        """
        revealed = None
        if is_id(job_id):
            with self._database.read() as session:
                revealed = self._jobs.find_revealed(session, job_id)
        if revealed is None:
            raise ApiError("JOB_NOT_FOUND")
        return revealed

    # --- the machinery -----------------------------------------------------------------------------------------

    def queue_statuses(self) -> list[QueueStatus]:
        """Return the job queues. The broker's numbers are None while it is away."""
        with self._database.read() as session:
            return self._queues.read_statuses(session)

    def outbox_status(self) -> OutboxStatus:
        """Return the state of the outbox."""
        with self._database.read() as session:
            return self._outbox.read_status(session)

    def list_outbox(
        self,
        status: str | None = None,
        event_type: str | None = None,
        cursor: str | None = None,
        limit: int = DEFAULT_LIMIT,
    ) -> Page[OutboxRow]:
        """Return outbox events, newest first; of one status, the latest due time first."""
        with self._database.read() as session:
            return self._outbox.find_page(session, status, event_type, cursor, limit)

    def get_event(self, event_id: str) -> OutboxRow:
        """Return an outbox event; `NOT_FOUND`."""
        row = None
        if is_id(event_id):
            with self._database.read() as session:
                row = self._outbox.find(session, event_id)
        if row is None:
            raise ApiError("NOT_FOUND")
        return row

    def workers(self) -> Workers:
        """Return all workers with a heartbeat, and those that hold jobs without one."""
        with self._database.read() as session:
            return self._workers.read(session)

    def passes(self) -> tuple[PassRow, ...]:
        """Return the passes of the maintenance consumers, and how each last went."""
        with self._database.read() as session:
            return read_passes(session, self._clock, PASSES)

    def broker(self) -> BrokerState:
        """Return whether the broker answers and takes messages."""
        return self._broker.probe()

    def providers(self) -> Providers:
        """Return all AI providers: breakers, running calls, and sums of today's calls."""
        return self._providers.read(self._database)

    def get_breaker(self, provider: str) -> BreakerState:
        """Return the platform's breaker of a provider; `NOT_FOUND` if it isn't configured."""
        state = self._providers.find_state(provider)
        if state is None:
            raise ApiError("NOT_FOUND")
        return state

    # --- provider calls ----------------------------------------------------------------------------------------

    def usage(self, wanted: UsageFilter) -> Usage:
        """Return the sums of a filter's calls, by its groups and in total."""
        with self._database.read() as session:
            return find_groups(session, wanted)
