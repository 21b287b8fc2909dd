"""A small kit for tests of the record: services over a migrated database and a broker in memory.

`open_kit(url)` gives them; the kit makes synthetic jobs, takes them, puts them into any state by the lifecycle's own
writers, and reads rows and history as the database holds them.
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
"""Where a frozen clock stands at first."""

BACKGROUND_TYPE = "synthetic_background"
"""`synthetic` on the queue `ai-background`."""
STUBBORN_TYPE = "synthetic_stubborn"
"""`synthetic` that can't be cancelled."""


class KitBroker(MemoryBroker):
    """The broker in memory, with the attribute that the wiring looks for."""

    client: Any = None


@dataclass
class Kit:
    """Services and what tests do with them. `clock` is the services' clock; `broker` their broker."""

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
        """A request of the user u1 for a synthetic job with these calls; `changes` are its fields or overrides."""
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
        """A new queued job."""
        created = self.create(*calls, **changes)
        assert created.created
        return created.job

    def lock(self, job_id: str, instance: str = "worker-1") -> Lease:
        """Take the job; the lease."""
        return lease_of(self.lifecycle.lock_job(job_id, instance).job)

    def running(self, **changes: Any) -> Lease:
        """The lease of a new job that a worker just took."""
        return self.lock(self.new_job(**changes).id)

    def advance(self, seconds: float) -> None:
        """Move a frozen clock."""
        assert isinstance(self.clock, ManualClock)
        self.clock.advance(timedelta(seconds=seconds))

    def job_in(self, state: str, **changes: Any) -> tuple[str, Lease]:
        """A job brought into `state` by its writers, and the lease of the attempt that was (or would be) its last.

        Beside the five states: `retrying` (running, waits for its next attempt, due now), `cancel_requested`
        (running, a worker holds it).
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
        """Overwrite columns of a job behind the lifecycle's back."""
        with self.database.transaction() as session:
            session.execute(update(AiJob).where(AiJob.id == job_id).values(**values))

    def analyze(self, table: str) -> None:
        """Have the database learn how many rows of which kind a table holds, as it does by itself in time."""
        words = "ANALYZE TABLE" if is_mysql(self.database.engine.dialect) else "ANALYZE"
        with self.database.engine.begin() as connection:
            connection.execute(text(f"{words} {table}"))

    # --- reading -----------------------------------------------------------------------------------------------

    def job(self, job_id: str) -> AiJob:
        """The job as it is now."""
        with self.database.read() as session:
            return session.get_one(AiJob, job_id)

    def row(self, job_id: str) -> dict[str, Any]:
        """Every column of the job's row, output and internal message too."""
        return self.rows("ai_jobs", id=job_id)[0]

    def rows(self, table: str, **where: Any) -> list[dict[str, Any]]:
        """Every column of a table's rows, in order of the primary key."""
        source: Table = Base.metadata.tables[table]
        query = select(source).filter_by(**where).order_by(*source.primary_key.columns)
        with self.database.read() as session:
            return [dict(row) for row in session.execute(query).mappings()]

    def everything(self) -> dict[str, list[dict[str, Any]]]:
        """All rows of all our tables: for `nothing was written`."""
        return {name: self.rows(name) for name in Base.metadata.tables}

    def counts(self) -> dict[str, int]:
        """How many rows each table has, those with none left out."""
        with self.database.read() as session:
            found = {
                name: session.execute(select(func.count()).select_from(table)).scalar_one()
                for name, table in Base.metadata.tables.items()
            }
        return {name: count for name, count in found.items() if count}

    def history(self, job_id: str) -> list[AiJobEvent]:
        """The job's history in order."""
        with self.database.read() as session:
            query = select(AiJobEvent).where(AiJobEvent.job_id == job_id).order_by(AiJobEvent.seq)
            return list(session.execute(query).scalars())

    def types(self, job_id: str) -> list[str]:
        """The types of the job's history rows; their numbers are 1, 2, 3 … and end at the job's `event_seq`."""
        history = self.history(job_id)
        assert [row.seq for row in history] == list(range(1, len(history) + 1))
        assert self.job(job_id).event_seq == len(history)
        return [row.type for row in history]

    def events(self, job_id: str, event_type: str | None = None) -> list[OutboxEvent]:
        """The job's outbox events in the order they were made."""
        query = select(OutboxEvent).where(OutboxEvent.aggregate_id == job_id).order_by(OutboxEvent.id)
        with self.database.read() as session:
            found = list(session.execute(query).scalars())
        return [one for one in found if event_type in (None, one.event_type)]

    @contextmanager
    def statements(self) -> Iterator[list[str]]:
        """The SQL that is run meanwhile."""
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
    """The kit over a migrated database (`create_database(prepare_database)`); `clock` None: the database's own.

    `settings` are fields of `Settings`; no limits for users without them. `broker` None: one in memory.
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
    """Run these in threads that start at one barrier; what each returned, or the exception it raised."""
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
