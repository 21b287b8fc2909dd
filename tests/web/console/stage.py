"""Jobs in every state, created by the real service and engine, for tests of the console."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from argon2 import PasswordHasher
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import Connection, select, update

from aijobs.clock import utc_now
from aijobs.db.engines import build_engine
from aijobs.db.schema import upgrade
from aijobs.ids import InstanceId
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreateJobInput
from aijobs.operators.models import Operator
from aijobs.outbox.models import OutboxEvent, OutboxEventType, QueuePause
from aijobs.queues.message import JobMessage
from aijobs.queues.presence import Presence
from aijobs.settings import Settings
from aijobs.wiring.engine import build_engine as build_job_engine
from aijobs.wiring.services import Services

PASSWORD = "correct horse battery"
# The weakest parameters, so that signing in is fast.
PASSWORD_HASH = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1).hash(PASSWORD)


def prepare(url: str) -> None:
    """Create the schema and one operator of each role."""
    engine = build_engine(url)
    upgrade(engine)
    with engine.begin() as connection:
        add_operators(connection)
    engine.dispose()


def add_operators(connection: Connection) -> None:
    """Insert one operator of each role."""
    for role in ("VIEWER", "OPERATOR", "SUPER_ADMIN"):
        connection.execute(
            Operator.__table__.insert().values(
                id=f"00000000-0000-7000-8000-00000000000{len(role) % 10}",
                username=role.lower(),
                password_hash=PASSWORD_HASH,
                role=role,
                active=True,
                session_version=1,
                created_at=utc_now(),
            )
        )


class Stage:
    """Services with one worker process, which takes jobs only on demand."""

    def __init__(self, services: Services, app: Flask) -> None:
        self.services, self.app = services, app
        self.instance = InstanceId.current()
        self.presence = Presence(services.broker.client, self.instance, "ai-interactive", slots=3)
        self.engine = build_job_engine(services, self.presence, self.instance, abandon=lambda: None)

    # --- jobs ---------------------------------------------------------------------------------------------

    def create(self, *calls: dict[str, Any], user: str = "learner-1", target: str = "note-7") -> str:
        """Create a synthetic job that does what `calls` say, and return its id."""
        job_input = {"calls": list(calls) or [{"output": {"said": "hello"}, "artifacts": 2}]}
        return self.services.jobs.create_job(CreateJobInput(user, "synthetic", "note", target, job_input)).job.id

    def run(self, job_id: str) -> str:
        """Run the job's next attempt and return its outcome."""
        with self.services.database.transaction() as session:
            session.execute(
                update(OutboxEvent).where(OutboxEvent.aggregate_id == job_id).values(available_at=utc_now())
            )
            session.execute(
                update(AiJob)
                .where(AiJob.id == job_id, AiJob.next_attempt_at.is_not(None))
                .values(next_attempt_at=utc_now() - timedelta(seconds=1))
            )
        self.deliver(job_id)
        return self.engine.execute(JobMessage(job_id, "synthetic", "0" * 64, "2026-01-01T00:00:00.000000Z"))

    def deliver(self, job_id: str) -> None:
        """Mark the job's enqueue events published, as the dispatcher does after sending."""
        with self.services.database.transaction() as session:
            session.execute(
                update(OutboxEvent)
                .where(OutboxEvent.aggregate_id == job_id, OutboxEvent.event_type == OutboxEventType.ENQUEUE)
                .values(status="published", published_at=utc_now(), last_sent_at=utc_now())
            )

    def succeeded(self, **kwargs: Any) -> str:
        job_id = self.create({"output": {"said": "hello"}, "artifacts": 3}, **kwargs)
        self.run(job_id)
        return job_id

    def failed(self, code: str = "CONTENT_SAFETY_BLOCKED", **kwargs: Any) -> str:
        job_id = self.create({"raise": code}, **kwargs)
        self.run(job_id)
        return job_id

    def retrying(self, **kwargs: Any) -> str:
        job_id = self.create({"raise": "PROVIDER_UNAVAILABLE"}, **kwargs)
        self.run(job_id)
        return job_id

    def running(self, **kwargs: Any) -> str:
        job_id = self.create(**kwargs)
        self.deliver(job_id)
        self.services.lifecycle.lock_job(job_id, str(self.instance))
        self.presence.started(job_id)
        return job_id

    def queued(self, **kwargs: Any) -> str:
        job_id = self.create(**kwargs)
        self.deliver(job_id)
        return job_id

    def cancelled(self, **kwargs: Any) -> str:
        job_id = self.create(**kwargs)
        self.services.jobs.cancel(job_id, "operator:somebody")
        return job_id

    def cancel_requested(self, **kwargs: Any) -> str:
        job_id = self.running(**kwargs)
        self.services.jobs.cancel(job_id, "operator:somebody")
        return job_id

    def recovered(self) -> tuple[str, str]:
        """Make a failed job and its successful retry."""
        parent = self.create({"raise": "CONTENT_SAFETY_BLOCKED"})
        self.run(parent)
        child = self.services.jobs.retry(parent, "operator:somebody").job.id
        return parent, child

    def each_phase(self) -> dict[str, str]:
        """Make one job in each phase; return ids by phase."""
        return {
            "created": self.create(),
            "queued": self.queued(),
            "running": self.running(),
            "retrying": self.retrying(),
            "cancel_requested": self.cancel_requested(),
            "succeeded": self.succeeded(),
            "failed": self.failed(),
            "cancelled": self.cancelled(),
        }

    # --- rows and operators -------------------------------------------------------------------------------

    def job(self, job_id: str) -> AiJob:
        with self.services.database.read() as session:
            return session.execute(select(AiJob).where(AiJob.id == job_id)).scalar_one()

    def set_job(self, job_id: str, **values: Any) -> None:
        """Write values that no service would write."""
        with self.services.database.transaction() as session:
            session.execute(update(AiJob).where(AiJob.id == job_id).values(**values))

    def pause(self, queue_name: str, reason: str) -> None:
        with self.services.database.transaction() as session:
            session.add(QueuePause(queue_name=queue_name, reason=reason, paused_by="operator:x", paused_at=utc_now()))

    def client(self, role: str | None = "OPERATOR", language: str = "en") -> Console:
        """Return a browser without JavaScript, signed in with a role (None: not signed in)."""
        console = Console(self.app.test_client(), language)
        if role is not None:
            answer = console.sign_in(role.lower())
            assert answer.status_code == 303, answer.text
        return console

    def copy_of(self, console: Console) -> Console:
        """Return another browser with the same cookies, as if they were stolen."""
        copy = self.app.test_client()
        for cookie in console.http._cookies.values():
            copy.set_cookie(cookie.key, cookie.value, domain=cookie.domain, path=cookie.path)
        return Console(copy)


class Console:
    """A client that takes tokens from forms as a browser does."""

    def __init__(self, client: FlaskClient, language: str = "en") -> None:
        self.http = client
        self._headers = {"Accept-Language": language}

    def get(self, address: str, **headers: str) -> Any:
        return self.http.get(address, headers={**self._headers, **headers})

    def post(self, address: str, data: dict[str, Any] | None = None, **headers: str) -> Any:
        return self.http.post(address, data=data or {}, headers={**self._headers, **headers})

    def soup(self, address: str, **headers: str) -> Any:
        answer = self.get(address, **headers)
        assert answer.status_code == 200, (address, answer.status_code, answer.text[:500])
        return parse(answer)

    def fields(self, address: str, action: str | None = None) -> dict[str, str]:
        """Return the hidden and text fields of a form on a page, with their values."""
        soup = parse(self.get(address))
        form = next(f for f in soup.find_all("form") if f["method"] == "post" and action in (None, f["action"]))
        inputs = form.find_all(["input", "textarea"])
        return {field["name"]: field.get("value", "") for field in inputs if field.get("name")}

    def sign_in(self, username: str, password: str = PASSWORD, back: str = "") -> Any:
        address = "/console/login" + (f"?next={back}" if back else "")
        fields = self.fields(address, "/console/login")
        return self.post("/console/login", {**fields, "username": username, "password": password})


def parse(answer: Any) -> Any:
    """Parse an answer."""
    from bs4 import BeautifulSoup

    return BeautifulSoup(answer.text, "html.parser")


def build_settings(sqlite_url: str, redis_url: str, instance_path: Any) -> Settings:
    """Return settings for one test."""
    return Settings.load(
        {
            "AIJOBS_DATABASE_URL": sqlite_url,
            "AIJOBS_REDIS_URL": redis_url,
            "AIJOBS_INSTANCE_PATH": str(instance_path),
        }
    )
