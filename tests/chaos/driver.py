"""Performing the actions of a plan, as the learning app, operators and the product's own services would; and keeping
what each of them was promised."""

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
"""How long an action waits to learn the job that it speaks of."""
UNAVAILABLE = "PLATFORM_UNAVAILABLE"
IN_THE_MIDDLE = timedelta(milliseconds=300)


class NoAnswer(Exception):
    """What was asked may or may not have been done."""


class Unavailable(Exception):
    """What was asked was not done, as no provider is to be asked now."""


@dataclass
class Promise:
    """What one create came to, as its callers were told."""

    create: Create
    job_ids: list[str] = field(default_factory=list)
    """Of each answer, in order."""
    made: int = 0
    """Answers that said that this request made the job."""
    unanswered: int = 0
    refused: int = 0
    """Answers that no job was made, as no provider could be asked."""
    chain: list[str] = field(default_factory=list)
    """The job, then each retry of it that was answered."""
    notes: list[str] = field(default_factory=list)


class Book:
    """Promises by create number, and jobs by what was asked for them. Safe to use from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.promises: dict[int, Promise] = {}
        self.cancelled: set[str] = set()
        """Jobs whose cancel was acknowledged before they had ended."""
        self.surprises: list[str] = []
        """Answers that nothing in a run can explain."""
        self.answers: Counter[str] = Counter()

    def of(self, create: Create) -> Promise:
        """The promise of a create."""
        with self._changed:
            return self.promises.setdefault(create.number, Promise(create))

    def note(self, action: Action, answer: str, change: Callable[[Promise], None] | None = None) -> None:
        """Write down what an action was answered."""
        promise = self.of(action.create)
        with self._changed:
            self.answers[f"{action.kind}: {answer}"] += 1
            promise.notes.append(f"{utc_now().time().isoformat('milliseconds')} {action.kind}: {answer}")
            if change is not None:
                change(promise)
            self._changed.notify_all()

    def surprise(self, action: Action, what: str) -> None:
        """Write down an answer that is wrong whatever happened."""
        with self._changed:
            self.surprises.append(f"{action}: {what}")

    def newest(self, create: Create) -> str | None:
        """The newest job of a create's chain; waits for it a while. None where nobody was told one."""
        promise = self.of(create)
        with self._changed:
            self._changed.wait_for(lambda: promise.chain or promise.unanswered or promise.refused, KNOW_WITHIN_S)
            return promise.chain[-1] if promise.chain else None


class Driver:
    """The callers of the run. `perform` may be called from many threads."""

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
        """Whether a process of this machine is in the middle of a job; False where the database doesn't say."""
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
        """Whether the database takes a write now. A process that is frozen in one of its own holds up all of SQLite."""
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
        """Do it, and write down what was answered."""
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

        def told(promise: Promise) -> None:
            promise.job_ids.append(job_id)
            promise.made += made
            if not promise.chain:
                promise.chain.append(job_id)

        self.book.note(action, "made" if made else "found", told)

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

            def told(promise: Promise) -> None:
                if body["jobId"] not in promise.chain:
                    promise.chain.append(body["jobId"])

            self.book.note(action, "made" if status == 201 else "found", told)
        elif status == 409 and body["error"]["code"] == "JOB_NOT_RETRYABLE":
            self.book.note(action, f"refused ({body['error']['details']['reason']})")
        else:
            self.book.surprise(action, f"HTTP {status} {body}")

    def _post(
        self, path: str, token: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and JSON body. `NoAnswer` where the server is away, or says that it is in trouble itself;
        `Unavailable` where it says that a provider is.
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
        """A plain job once everything is healthy again: the system must be good for more than its old work."""
        create = Create(number, "synthetic", USERS[0], None, Script("afterwards", ({"sleep_ms": 10},)), 1, 0)
        action = Action(time.monotonic(), "create", create)
        self.perform(action)
        return self.book.of(create).chain[0]
