"""The driver: performs the actions of a plan through the API and the services, and records what each was promised."""

from __future__ import annotations

import http.client
import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from aijobs.cli.tokens import issue_user_token
from aijobs.clock import utc_now
from aijobs.db.database import Database
from aijobs.errors import ApiError
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreateJobInput, Overrides
from aijobs.jobs.status import JobState
from aijobs.operators.accounts import add_token, create_operator
from aijobs.operators.audit import Actor, AuditTrail
from aijobs.settings import Settings
from aijobs.web.auth import hash_password, make_operator_token
from aijobs.wiring.services import Services, build_services
from tests.chaos.plan import FLASHCARDS, USERS, Action, Create, Script

HTTP_TIMEOUT_S = 8.0
KNOW_WITHIN_S = 10.0
"""How long an action waits for the id of its job."""
UNAVAILABLE = "PLATFORM_UNAVAILABLE"
IN_THE_MIDDLE = timedelta(milliseconds=300)


class NoAnswer(Exception):
    """The request may or may not have been carried out."""


class Unavailable(Exception):
    """The request was refused because no provider is available."""


@dataclass
class Promise:
    """The answers to one create and its repeats."""

    create: Create
    job_ids: list[str] = field(default_factory=list)
    """The job id in each answer, in order."""
    made: int = 0
    """The number of answers that said that this request created the job."""
    unanswered: int = 0
    refused: int = 0
    """The number of answers that refused the job because no provider was available."""
    chain: list[str] = field(default_factory=list)
    """The job, then each retry of it with an answer."""
    notes: list[str] = field(default_factory=list)


class Book:
    """Promises by the number of their create. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.promises: dict[int, Promise] = {}
        self.cancelled: set[str] = set()
        """Jobs whose cancel was acknowledged before they ended."""
        self.surprises: list[str] = []
        """Answers that no fault can explain."""
        self.answers: Counter[str] = Counter()

    def of(self, create: Create) -> Promise:
        """Return the promise of a create."""
        with self._changed:
            return self.promises.setdefault(create.number, Promise(create))

    def note(self, action: Action, answer: str, change: Callable[[Promise], None] | None = None) -> None:
        """Record the answer to an action."""
        promise = self.of(action.create)
        with self._changed:
            self.answers[f"{action.kind}: {answer}"] += 1
            promise.notes.append(f"{utc_now().time().isoformat('milliseconds')} {action.kind}: {answer}")
            if change is not None:
                change(promise)
            self._changed.notify_all()

    def surprise(self, action: Action, what: str) -> None:
        """Record an answer that no fault can explain."""
        with self._changed:
            self.surprises.append(f"{action}: {what}")

    def newest(self, create: Create) -> str | None:
        """Return the newest job of a create's chain, after waiting for it; None if no answer named one."""
        promise = self.of(create)
        with self._changed:
            self._changed.wait_for(lambda: promise.chain or promise.unanswered or promise.refused, KNOW_WITHIN_S)
            return promise.chain[-1] if promise.chain else None


class Driver:
    """The clients of the run. `perform` is thread-safe."""

    def __init__(self, env: Mapping[str, str], port: int) -> None:
        self.settings = Settings.load(env)
        self.database = Database(self.settings.database_url, pool_size=10)
        self.services: Services = build_services(self.settings, database=self.database)
        self.book = Book()
        self._port = port
        self._user_tokens = {user: issue_user_token(self.settings, user, 24) for user in USERS}
        self._operator_token = self._make_operator()

    def close(self) -> None:
        """Close the connections."""
        self.database.dispose()
        self.services.broker.client.close()

    def _make_operator(self) -> str:
        token, digest = make_operator_token()
        trail = AuditTrail(self.database, self.services.clock, Actor("cli:chaos"))
        with self.database.transaction() as session:
            create_operator(session, trail, "chaos", hash_password("correct horse battery"), "OPERATOR")
            add_token(session, trail, "chaos", digest, "chaos", utc_now() + timedelta(days=1))
        return token

    def is_at_work(self, pid: int) -> bool:
        """Return whether a process has been running a job for a while; False if the database doesn't answer."""
        held = select(AiJob.id).where(
            AiJob.lifecycle_status == JobState.RUNNING,
            AiJob.locked_by.contains(f"~{pid}~"),
            AiJob.locked_at <= self.services.clock.now(-IN_THE_MIDDLE),
        )
        try:
            with self.database.read() as session:
                return session.execute(held.limit(1)).first() is not None
        except (DBAPIError, PoolTimeout):
            return False

    def can_write(self) -> bool:
        """Return whether the database accepts a write now. On SQLite, a process suspended in a write blocks all."""
        url = self.database.engine.url
        if url.get_backend_name() != "sqlite":
            return True
        connection = sqlite3.connect(str(url.database), timeout=0.3)
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        finally:
            connection.close()
        return True

    # --- actions -----------------------------------------------------------------------------------------------

    def perform(self, action: Action) -> None:
        """Perform the action and record the answer."""
        how = {"create": self._create, "repeat": self._create, "cancel": self._cancel, "retry": self._retry}
        try:
            how[action.kind](action)
        except NoAnswer as lost:

            def unanswered(promise: Promise) -> None:
                promise.unanswered += action.kind in ("create", "repeat")

            self.book.note(action, f"no answer ({lost})", unanswered)
        except Unavailable:

            def refused(promise: Promise) -> None:
                promise.refused += action.kind in ("create", "repeat")

            self.book.note(action, "refused (no provider)", refused)

    def _create(self, action: Action) -> None:
        create = action.create
        job_id, made = self._ask_http(action) if create.job_type == FLASHCARDS else self._ask_service(create)
        if job_id is None:
            return

        def record(promise: Promise) -> None:
            promise.job_ids.append(job_id)
            promise.made += made
            if not promise.chain:
                promise.chain.append(job_id)

        self.book.note(action, "made" if made else "found", record)

    def _ask_service(self, create: Create) -> tuple[str, bool]:
        request = CreateJobInput(
            user_id=create.user_id,
            job_type=create.job_type,
            target_type="note",
            target_id=create.target_id,
            input=create.input,
            idempotency_key=create.key,
            overrides=Overrides(priority=create.priority),
        )
        try:
            made = self.services.jobs.create_job(request)
        except (DBAPIError, PoolTimeout) as error:
            raise NoAnswer(type(error).__name__) from error
        except ApiError as refused:
            if refused.code == "SERVICE_BUSY":
                raise NoAnswer(refused.code) from refused
            if refused.code == UNAVAILABLE:
                raise Unavailable from refused
            raise
        return made.job.id, made.created

    def _ask_http(self, action: Action) -> tuple[str | None, bool]:
        create = action.create
        headers = {"Idempotency-Key": create.key} if create.key else {}
        token = self._user_tokens[create.user_id]
        status, body = self._post("/api/learning/flashcards", token, create.input, headers)
        if status not in (200, 202):
            self.book.surprise(action, f"HTTP {status} {body}")
            return None, False
        return body["jobId"], status == 202

    def _cancel(self, action: Action) -> None:
        job_id = self.book.newest(action.create)
        if job_id is None:
            self.book.note(action, "no job is known")
            return
        token = self._user_tokens[action.create.user_id]
        status, body = self._post(f"/api/ai/jobs/{job_id}/cancel", token)
        if status != 200:
            self.book.surprise(action, f"HTTP {status} {body}")
            return
        if body["phase"] in ("cancel_requested", "cancelled"):
            self.book.note(action, "acknowledged", lambda _: self.book.cancelled.add(job_id))
        elif body["lifecycleStatus"] in ("succeeded", "failed"):
            self.book.note(action, f"had {body['lifecycleStatus']}")
        else:
            self.book.surprise(action, f"answered 200 and goes on: {body}")

    def _retry(self, action: Action) -> None:
        job_id = self.book.newest(action.create)
        if job_id is None:
            self.book.note(action, "no job is known")
            return
        status, body = self._post(f"/admin-api/ai/jobs/{job_id}/retry", self._operator_token)
        if status in (200, 201):

            def record(promise: Promise) -> None:
                if body["jobId"] not in promise.chain:
                    promise.chain.append(body["jobId"])

            self.book.note(action, "made" if status == 201 else "found", record)
        elif status == 409 and body["error"]["code"] == "JOB_NOT_RETRYABLE":
            self.book.note(action, f"refused ({body['error']['details']['reason']})")
        else:
            self.book.surprise(action, f"HTTP {status} {body}")

    def _post(
        self, path: str, token: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Return status and JSON body. Raises `NoAnswer` if the server is away or answers 5xx, `Unavailable` if no
        provider is available.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=HTTP_TIMEOUT_S)
        try:
            data = json.dumps(body) if body is not None else None
            sent = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", **(headers or {})}
            connection.request("POST", path, data, sent)
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(type(error).__name__) from error
        finally:
            connection.close()
        if answer.status == 503 and UNAVAILABLE.encode() in text:
            raise Unavailable
        if answer.status >= 500:
            raise NoAnswer(f"HTTP {answer.status}")
        return answer.status, json.loads(text)

    # --- afterwards --------------------------------------------------------------------------------------------

    def create_afterwards(self, number: int) -> str:
        """Create a simple job after the last fault, to see that the system accepts new work."""
        create = Create(number, "synthetic", USERS[0], None, Script("afterwards", ({"sleep_ms": 10},)), 1, 0)
        action = Action(time.monotonic(), "create", create)
        self.perform(action)
        return self.book.of(create).chain[0]
