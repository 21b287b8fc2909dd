"""A kit for tests of jobs: services over a migrated database and a broker in memory.

`open_kit(url)` opens it. The kit creates synthetic jobs, locks them, brings them into any state through the
lifecycle, and reads their rows and history.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Table, event, func, select, text, update

from aijobs.db.clock import Clock, ManualClock
from aijobs.db.database import Base, Database, is_mysql
from aijobs.definitions.definition import Queue
from aijobs.job_types.synthetic import DEFINITION
from aijobs.jobs.lease import JobErrorInfo, Lease, lease_of
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.jobs.models import AiJob, AiJobEvent
from aijobs.jobs.requests import CreatedJob, CreateJobInput, Overrides
from aijobs.jobs.service import AiJobService
from aijobs.outbox.models import OutboxEvent, QueuePause
from aijobs.settings import KeyRing, Settings
from aijobs.testing.memory_broker import MemoryBroker
from aijobs.wiring.services import Services, build_services
from tests.support.gateways import health
from tests.support.rows import prepare_database
from tests.support.scratch import open_database

__all__ = ["BEGIN", "KEYS", "Kit", "KitBroker", "open_kit", "prepare_database", "race"]

KEYS = KeyRing((("k1", b"m" * 32),))
CREDENTIAL_KEYS = KeyRing((("c1", b"c" * 32),))
BEGIN = datetime(2026, 3, 1, 8, 0, tzinfo=UTC)
"""The first time of a frozen clock."""

BACKGROUND_TYPE = "synthetic_background"
"""`synthetic` on the queue `ai-background`."""
STUBBORN_TYPE = "synthetic_stubborn"
"""`synthetic` that can't be cancelled."""


class KitBroker(MemoryBroker):
    """The broker in memory, with the attribute `client`, which the wiring reads."""

    client: Any = None


@dataclass
class Kit:
    """Services with their clock and broker, and shortcuts for tests."""

    services: Services
    broker: Any
    clock: Clock
    url: str

    @property
    def database(self) -> Database:
        return self.services.database

    @property
    def lifecycle(self) -> LifecycleRepository:
        return self.services.lifecycle

    @property
    def jobs(self) -> AiJobService:
        return self.services.jobs

    # --- making ------------------------------------------------------------------------------------------------

    def request(self, *calls: Mapping[str, Any], **changes: Any) -> CreateJobInput:
        """Return a request of user u1 for a synthetic job with these calls; `changes` are fields or overrides."""
        overrides = {name: changes.pop(name) for name in list(changes) if name in Overrides.__dataclass_fields__}
        values: dict[str, Any] = {
            "user_id": "u1",
            "job_type": "synthetic",
            "target_type": "note",
            "target_id": "n1",
            "input": {"calls": [dict(call) for call in calls] or [{"output": {"said": "hello"}}]},
            "overrides": Overrides(**overrides),
        }
        return CreateJobInput(**{**values, **changes})

    def create(self, *calls: Mapping[str, Any], **changes: Any) -> CreatedJob:
        """Create a synthetic job through the service."""
        return self.jobs.create_job(self.request(*calls, **changes))

    def new_job(self, *calls: Mapping[str, Any], **changes: Any) -> AiJob:
        """Create a queued job."""
        created = self.create(*calls, **changes)
        assert created.created
        return created.job

    def lock(self, job_id: str, instance: str = "worker-1") -> Lease:
        """Lock the job by its message and return the lease."""
        with self.database.read() as session:
            job = session.get(AiJob, job_id)
            event = self.services.outbox_events.enqueue_event(session, job) if job else None
        event_id = event.id if event else None
        return lease_of(self.lifecycle.lock_job(job_id, instance, event_id=event_id).job)

    def running(self, **changes: Any) -> Lease:
        """Create and lock a job; return the lease."""
        return self.lock(self.new_job(**changes).id)

    def advance(self, seconds: float) -> None:
        """Advance the frozen clock."""
        assert isinstance(self.clock, ManualClock)
        self.clock.advance(timedelta(seconds=seconds))

    def job_in(self, state: str, **changes: Any) -> tuple[str, Lease]:
        """Bring a new job into `state` through the lifecycle. Return its id and last lease, if need be a made-up one.

        Besides the five states: `retrying` (running, waits for its next attempt, due now), `cancel_requested`
        (running, a worker holds it), `cancelled_waiting` (cancelled before any attempt).
        """
        job = self.new_job(**changes)
        if state == "queued":
            return job.id, Lease(job.id, "worker-1/never", 1)
        if state == "cancelled_waiting":
            self.lifecycle.request_cancel(job.id, "user:u1")
            return job.id, Lease(job.id, "worker-1/never", 1)
        lease = self.lock(job.id)
        if state == "succeeded":
            self.lifecycle.mark_succeeded(lease)
        elif state == "failed":
            self.lifecycle.mark_failed(lease, JobErrorInfo.of("INTERNAL_ERROR", "scripted"))
        elif state == "cancelled":
            self.lifecycle.request_cancel(job.id, "user:u1")
            self.lifecycle.mark_cancelled(lease)
        elif state == "cancel_requested":
            self.lifecycle.request_cancel(job.id, "user:u1")
        elif state == "retrying":
            self.lifecycle.release(lease)
        else:
            assert state == "running", state
        return job.id, lease

    def pause(self, queue_name: str = "ai-interactive") -> None:
        """Pause a queue."""
        with self.database.transaction() as session:
            session.add(QueuePause(queue_name=queue_name, reason="test", paused_by="test", paused_at=BEGIN))

    def set(self, job_id: str, **values: Any) -> None:
        """Overwrite columns of a job without the lifecycle."""
        with self.database.transaction() as session:
            session.execute(update(AiJob).where(AiJob.id == job_id).values(**values))

    def analyze(self, table: str) -> None:
        """Update the statistics that the query planner uses for a table."""
        words = "ANALYZE TABLE" if is_mysql(self.database.engine.dialect) else "ANALYZE"
        with self.database.engine.begin() as connection:
            connection.execute(text(f"{words} {table}"))

    # --- reading -----------------------------------------------------------------------------------------------

    def job(self, job_id: str) -> AiJob:
        """Return the job's current row."""
        with self.database.read() as session:
            return session.get_one(AiJob, job_id)

    def row(self, job_id: str) -> dict[str, Any]:
        """Return every column of the job's row, including output and internal message."""
        return self.rows("ai_jobs", id=job_id)[0]

    def rows(self, table: str, **where: Any) -> list[dict[str, Any]]:
        """Return every column of a table's rows, in order of the primary key."""
        source: Table = Base.metadata.tables[table]
        query = select(source).filter_by(**where).order_by(*source.primary_key.columns)
        with self.database.read() as session:
            return [dict(row) for row in session.execute(query).mappings()]

    def everything(self) -> dict[str, list[dict[str, Any]]]:
        """Return all rows of all tables, to compare that nothing was written."""
        return {name: self.rows(name) for name in Base.metadata.tables}

    def counts(self) -> dict[str, int]:
        """Return the number of rows of each table that isn't empty."""
        with self.database.read() as session:
            found = {
                name: session.execute(select(func.count()).select_from(table)).scalar_one()
                for name, table in Base.metadata.tables.items()
            }
        return {name: count for name, count in found.items() if count}

    def history(self, job_id: str) -> list[AiJobEvent]:
        """Return the job's history in order."""
        with self.database.read() as session:
            query = select(AiJobEvent).where(AiJobEvent.job_id == job_id).order_by(AiJobEvent.seq)
            return list(session.execute(query).scalars())

    def types(self, job_id: str) -> list[str]:
        """Return the types of the job's history rows. Asserts that they are numbered 1, 2, … `event_seq`."""
        history = self.history(job_id)
        assert [row.seq for row in history] == list(range(1, len(history) + 1))
        assert self.job(job_id).event_seq == len(history)
        return [row.type for row in history]

    def events(self, job_id: str, event_type: str | None = None) -> list[OutboxEvent]:
        """Return the job's outbox events in the order of their creation."""
        query = select(OutboxEvent).where(OutboxEvent.aggregate_id == job_id).order_by(OutboxEvent.id)
        with self.database.read() as session:
            found = list(session.execute(query).scalars())
        return [one for one in found if event_type in (None, one.event_type)]

    @contextmanager
    def statements(self) -> Iterator[list[str]]:
        """Collect the SQL statements that run in the block."""
        seen: list[str] = []

        def note(_conn: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
            seen.append(statement)

        event.listen(self.database.engine, "before_cursor_execute", note)
        try:
            yield seen
        finally:
            event.remove(self.database.engine, "before_cursor_execute", note)


@contextmanager
def open_kit(url: str, *, clock: Clock | None = None, broker: Any = None, **settings: Any) -> Iterator[Kit]:
    """Open a kit over a migrated database (`create_database(prepare_database)`).

    The defaults are the database's clock and a broker in memory. `settings` are fields of `Settings`; by default
    users have no limit of active jobs.
    """
    values: dict[str, Any] = {
        "instance_path": Path("/nonexistent"),
        "database_url": url,
        "secret_key": "s" * 32,
        "jwt_secret": "j" * 32,
        "message_keys": KEYS,
        "user_active_jobs": 0,  # One user has all the jobs of a test.
        "credential_keys": CREDENTIAL_KEYS,
        **settings,
    }
    chosen = Settings(**values)
    broker = KitBroker(chosen.message_keys) if broker is None else broker
    with open_database(url) as database:
        services = build_services(chosen, database=database, clock=clock, broker=broker, **health())
        for job_type, changes in (
            (BACKGROUND_TYPE, {"queue": Queue("ai-background", 50)}),
            (STUBBORN_TYPE, {"execution": replace(DEFINITION.execution, cancellable=False)}),
        ):
            services.registry.register(replace(DEFINITION, job_type=job_type, **changes))  # type: ignore[arg-type]
        yield Kit(services, broker, services.clock, url)


def race(*works: Callable[[], Any], timeout: float = 60) -> list[Any]:
    """Run each work in a thread, all from one barrier. Return what each returned or the exception it raised."""
    barrier = threading.Barrier(len(works))
    outcomes: list[Any] = [None] * len(works)

    def run(index: int, work: Callable[[], Any]) -> None:
        barrier.wait(timeout)
        try:
            outcomes[index] = work()
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(n, work), daemon=True) for n, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), "a racer hangs"
    return outcomes
