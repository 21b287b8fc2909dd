"""Users' own keys over real databases: ownership, jobs without their key, and encryption at rest."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import QueuePool, event, text, update
from sqlalchemy.exc import TimeoutError as PoolTimeout
from structlog.testing import capture_logs

from aijobs import logs
from aijobs.ai.calling.router import ModelRouter
from aijobs.ai.provider import CancellationToken, GenerateRequest, Route
from aijobs.credentials import store as credential_store
from aijobs.credentials.models import UserModelCredential
from aijobs.credentials.service import MOST_CREDENTIALS
from aijobs.credentials.store import Credential
from aijobs.definitions.definition import USER_DEEPSEEK_KEY
from aijobs.errors import ApiError, InputInvalid, SettingsError
from aijobs.jobs.requests import CreatedJob, CreateJobInput, Overrides
from aijobs.settings import KeyRing
from aijobs.wiring.passes import build_job_crew, build_maintenance_crew
from tests.integration.engine.stage import CARDS, NOTES, Stage, open_stage
from tests.support.jobs import CREDENTIAL_KEYS, Kit, open_kit, race

API_KEY = "sk-canary-0123456789abcdef"
ROUTER = ModelRouter({"d": (Route("local", "m"),)}, "d", {USER_DEEPSEEK_KEY: (Route("local", "m"),)})


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Collect all log lines at DEBUG level."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = list(root.handlers), root.level
    logs.configure("DEBUG", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def stage(kit: Kit) -> Iterator[Stage]:
    """An engine that also sends calls on a user's key to the scripted provider."""
    with open_stage(kit, router=ROUTER) as opened:
        yield opened


def store(kit: Kit, user_id: str = "u1", key: str = API_KEY) -> str:
    return kit.services.credentials.create(user_id, key).id


def paid_job(kit: Kit, job_type: str, credential_id: str, user_id: str = "u1") -> str:
    """Create a job on the user's own key and return its id."""
    overrides = Overrides(credential_mode=USER_DEEPSEEK_KEY, credential_id=credential_id)
    request = CreateJobInput(user_id, job_type, "note", "note-1", NOTES, overrides=overrides)
    return kit.jobs.create_job(request).job.id


class Opening:
    """A provider that opens the key of each call, as the real one does, and records it."""

    def __init__(self) -> None:
        self.keys: list[str | None] = []

    def __call__(self, request: GenerateRequest, token: CancellationToken) -> Any:
        self.keys.append(request.credential.open() if request.credential else None)
        return json.dumps(CARDS)


def test_stored_key_shows_its_last_characters_and_pays_for_its_users_jobs(stage: Stage) -> None:
    kit, opening = stage.kit, Opening()
    made = kit.services.credentials.create("u1", API_KEY, "Mine")
    assert (made.label, made.last_four, made.mode, made.last_used_at) == ("Mine", "cdef", USER_DEEPSEEK_KEY, None)
    assert kit.services.credentials.list_own("u1") == [made]
    job_type = stage.asking(opening)
    assert stage.run_to_end(paid_job(kit, job_type, made.id)).lifecycle_status == "succeeded"
    assert stage.run_to_end(stage.new_cards(job_type)).lifecycle_status == "succeeded"
    assert opening.keys == [API_KEY, None]
    (used,) = kit.services.credentials.list_own("u1")
    assert used.last_used_at == made.created_at


def test_last_use_is_written_at_most_once_an_hour(kit: Kit) -> None:
    service, database = kit.services.credentials, kit.database
    job = kit.new_job(credential_mode=USER_DEEPSEEK_KEY, credential_id=store(kit))

    def use() -> Any:
        with database.read() as session:
            sealed = service.find_sealed(session, job)
        assert sealed is not None
        with kit.statements() as seen:
            service.note_use(sealed)
        (row,) = service.list_own("u1")
        return len([s for s in seen if s.startswith("UPDATE")]), row.last_used_at

    first = use()
    assert first[0] == 1
    kit.advance(3599)
    assert use() == (0, first[1])
    kit.advance(1)
    assert use() == (1, first[1] + timedelta(hours=1))


def test_last_use_is_skipped_if_the_connection_pool_is_exhausted(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    service, credential_id = kit.services.credentials, store(kit)
    job = kit.new_job(credential_mode=USER_DEEPSEEK_KEY, credential_id=credential_id)
    with kit.database.read() as session:
        sealed = service.find_sealed(session, job)
    assert sealed is not None
    pool = kit.database.engine.pool
    assert isinstance(pool, QueuePool)
    with ExitStack() as held, monkeypatch.context() as impatient:
        impatient.setattr(pool, "_timeout", 0.01)
        with suppress(PoolTimeout):
            while True:
                held.enter_context(kit.database.engine.connect())
        with capture_logs() as seen:
            service.note_use(sealed)
    assert [(line["event"], line["error"]) for line in seen] == [("credential.use_unnoted", "TimeoutError")]
    assert service.list_own("u1")[0].last_used_at is None


def test_key_of_another_user_cannot_be_listed_deleted_or_used(kit: Kit) -> None:
    mine, service = store(kit), kit.services.credentials
    before = kit.everything()
    assert service.list_own("u2") == []
    for user_id, credential_id in (("u2", mine), ("U1", mine), ("u1", mine.upper()), ("u1", "x" * 36)):
        with pytest.raises(ApiError, match="NOT_FOUND"):
            service.delete(user_id, credential_id)
    assert kit.everything() == before
    with pytest.raises(InputInvalid) as refused:
        kit.new_job(user_id="u2", credential_mode=USER_DEEPSEEK_KEY, credential_id=mine)
    assert refused.value.details == {"fields": [{"field": "credentialId", "message": "is no credential of this user"}]}
    assert not kit.rows("ai_jobs")


def test_twenty_concurrent_requests_do_not_exceed_the_limit_of_ten(live_kit: Kit) -> None:
    kit = live_kit
    outcomes = race(*[partial(store, kit, key=f"sk-{n:08}") for n in range(20)])
    refused = [one for one in outcomes if isinstance(one, ApiError)]
    assert len(outcomes) - len(refused) == MOST_CREDENTIALS == len(kit.rows("user_model_credentials"))
    assert {one.code for one in refused} == {"QUOTA_EXCEEDED"}
    assert refused[0].details == {"limit": "credentials", "used": 10, "allowed": 10}
    kit.services.credentials.delete("u1", kit.services.credentials.list_own("u1")[0].id)
    assert store(kit)
    assert store(kit, "u2")


def test_deletion_of_a_key_fails_waiting_jobs_but_no_running_call(stage: Stage) -> None:
    kit, begun, go = stage.kit, threading.Event(), threading.Event()
    opening = Opening()

    def slow(request: GenerateRequest, token: CancellationToken) -> Any:
        begun.set()
        assert go.wait(30)
        return opening(request, token)

    job_type = stage.asking(slow)
    credential_id = store(kit)
    running, waiting = (paid_job(kit, job_type, credential_id) for _ in range(2))
    delivery = stage.start(running)
    assert begun.wait(30)
    kit.services.credentials.delete("u1", credential_id)
    assert {kit.job(job_id).credential_id for job_id in (running, waiting)} == {None}
    go.set()
    assert delivery.wait() == "succeeded"
    assert opening.keys == [API_KEY]
    ended = stage.run_to_end(waiting)
    assert (ended.lifecycle_status, ended.error_code) == ("failed", "CREDENTIAL_NOT_FOUND")
    assert not stage.usage(waiting)
    with pytest.raises(ApiError) as refused:
        kit.jobs.retry(waiting, "operator:ann")
    assert refused.value.details == {"reason": "credential_gone"}


def test_deletion_of_a_key_detaches_its_ended_jobs_in_batches(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credential_store, "ENDED_AT_ONCE", 3)
    mine, other = store(kit), store(kit)
    terms = {"credential_mode": USER_DEEPSEEK_KEY, "user_id": "u1"}
    ended = [kit.new_job(credential_id=mine, **terms).id for _ in range(7)]
    for job_id in ended:
        kit.jobs.cancel(job_id, "user:u1")
    waiting = kit.new_job(credential_id=mine, **terms).id
    untouched = kit.new_job(credential_id=other, **terms).id
    history = kit.rows("ai_job_events")
    numbers = {row["id"]: row["event_seq"] for row in kit.rows("ai_jobs")}
    changed: list[int] = []

    def note(_conn: Any, cursor: Any, statement: str, *_rest: Any) -> None:
        if statement.startswith("UPDATE ai_jobs"):
            changed.append(cursor.rowcount)

    def over(_conn: Any) -> None:
        changed.append(0)

    event.listen(kit.database.engine, "after_cursor_execute", note)
    event.listen(kit.database.engine, "commit", over)
    try:
        kit.services.credentials.delete("u1", mine)
    finally:
        event.remove(kit.database.engine, "after_cursor_execute", note)
        event.remove(kit.database.engine, "commit", over)
    while changed[0] == 0:
        changed.pop(0)
    assert changed == [3, 0, 3, 0, 1, 0, 1, 0], "a commit after each batch, and the waiting job with the key itself"
    assert {job_id: kit.job(job_id).credential_id for job_id in (*ended, waiting, untouched)} == {
        **dict.fromkeys([*ended, waiting]),
        untouched: other,
    }
    assert kit.rows("ai_job_events") == history
    assert {row["id"]: row["event_seq"] for row in kit.rows("ai_jobs")} == numbers


def test_deletion_of_keys_concurrent_with_jobs_causes_no_deadlock(live_kit: Kit) -> None:
    """The lock order is user, job, credential; another order would deadlock here."""
    kit = live_kit
    ids = [store(kit) for _ in range(6)]
    old = [kit.running(credential_mode=USER_DEEPSEEK_KEY, credential_id=one) for one in ids]

    def make(credential_id: str) -> CreatedJob:
        return kit.create(credential_mode=USER_DEEPSEEK_KEY, credential_id=credential_id)

    outcomes = race(
        *[partial(kit.services.credentials.delete, "u1", one) for one in ids],
        *[partial(make, one) for one in ids],
        *[partial(kit.lifecycle.mark_succeeded, lease) for lease in old],
    )
    failed = [one for one in outcomes if isinstance(one, Exception)]
    assert all(isinstance(one, InputInvalid) for one in failed), failed
    assert not kit.rows("user_model_credentials")
    assert {row["credential_id"] for row in kit.rows("ai_jobs")} == {None}
    assert all(kit.job(lease.job_id).lifecycle_status == "succeeded" for lease in old)


GARBLED: dict[str, Callable[[bytes, bytes], dict[str, Any]]] = {
    "cut off": lambda own, other: {"ciphertext": own[:20]},
    "empty": lambda own, other: {"ciphertext": b""},
    "one bit": lambda own, other: {"ciphertext": own[:-1] + bytes([own[-1] ^ 1])},
    "another user's": lambda own, other: {"ciphertext": other},
    "an unknown key": lambda own, other: {"key_id": "gone"},
}


def garble(kit: Kit, credential_id: str, **values: Any) -> None:
    with kit.database.transaction() as session:
        session.execute(update(UserModelCredential).where(UserModelCredential.id == credential_id).values(**values))


def test_tampered_credential_fails_only_its_own_jobs(stage: Stage, log: io.StringIO) -> None:
    kit, opening = stage.kit, Opening()
    job_type = stage.asking(opening)
    good, other = store(kit), store(kit, "u2", "sk-of-somebody-else")
    (others,) = (row["ciphertext"] for row in kit.rows("user_model_credentials", id=other))
    for change in GARBLED.values():
        bad = store(kit)
        job_id = paid_job(kit, job_type, bad)
        (own,) = (row["ciphertext"] for row in kit.rows("user_model_credentials", id=bad))
        garble(kit, bad, **change(own, others))
        ended = stage.run_to_end(job_id)
        assert (ended.lifecycle_status, ended.error_code, ended.attempt_no) == ("failed", "CREDENTIAL_UNREADABLE", 1)
        internal = kit.row(job_id)["internal_error_message"]
        assert f"credential {bad} can't be decrypted" in internal
        assert API_KEY not in internal
    assert opening.keys == []
    assert stage.run_to_end(paid_job(kit, job_type, good)).lifecycle_status == "succeeded"
    assert opening.keys == [API_KEY]
    assert "job.failed" in log.getvalue()
    assert API_KEY not in log.getvalue()


def test_job_redirected_to_another_users_key_fails(stage: Stage) -> None:
    kit, opening = stage.kit, Opening()
    job_id = paid_job(kit, stage.asking(opening), store(kit))
    kit.set(job_id, credential_id=store(kit, "u2", "sk-of-somebody-else"))
    assert stage.run_to_end(job_id).error_code == "CREDENTIAL_UNREADABLE"
    assert opening.keys == []


def test_key_is_stored_only_encrypted_with_the_id_of_the_ring_key(stage: Stage) -> None:
    kit = stage.kit
    credential_id = store(kit)
    job_id = paid_job(kit, stage.asking(Opening()), credential_id)
    stage.run_to_end(job_id)
    kit.services.credentials.resolve(credential_id)
    (row,) = kit.rows("user_model_credentials")
    assert row["key_id"] == "c1"
    for name, rows in kit.everything().items():
        assert API_KEY not in str(rows), name
        assert API_KEY.encode() not in b"".join(v for r in rows for v in r.values() if isinstance(v, bytes)), name


def test_key_is_in_no_sql_statement(kit: Kit) -> None:
    given: list[str] = []

    def note(_conn: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
        given.append(f"{statement} {parameters!r}")

    event.listen(kit.database.engine, "before_cursor_execute", note)
    try:
        credential_id = store(kit)
        kit.services.credentials.resolve(credential_id)
        kit.services.credentials.delete("u1", credential_id)
    finally:
        event.remove(kit.database.engine, "before_cursor_execute", note)
    assert any("user_model_credentials" in one for one in given)
    assert API_KEY not in "".join(given)


C2, C3 = ("c2", b"d" * 32), ("c3", b"e" * 32)


def test_start_is_refused_without_a_ring_key_that_stored_keys_need(kit: Kit) -> None:
    store(kit)
    with open_kit(kit.url, credential_keys=KeyRing((C2, *CREDENTIAL_KEYS.keys))) as both:
        store(both)
        store(both, "u2")
        both.services.check_start()
    with open_kit(kit.url, credential_keys=KeyRing((C3,))) as another:
        with pytest.raises(SettingsError) as refused:
            another.services.check_start()
        why = "lacks what 3 stored user keys need: 'c1' (1), 'c2' (2); put it back behind the newest"
        assert str(refused.value) == f"AIJOBS_CREDENTIAL_KEYS {why}"
        with kit.database.transaction() as session:
            session.execute(text("DELETE FROM user_model_credentials WHERE key_id = 'c2'"))
        for start in (
            another.services.check_start,
            partial(build_job_crew, another.services, "ai-interactive", lambda: None),
            partial(build_maintenance_crew, another.services),
        ):
            with pytest.raises(SettingsError, match=r"what 1 stored user key needs: 'c1' \(1\)"):
                start()
    kit.services.check_start()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"key": None}, {"key"}),
        ({"key": 12345678}, {"key"}),
        ({"key": "short"}, {"key"}),
        ({"key": "k" * 513}, {"key"}),
        ({"key": "sk-with a space"}, {"key"}),
        ({"key": "sk-ümlaut-0000"}, {"key"}),
        ({"key": "sk-newline-0000\n"}, {"key"}),
        ({"key": "sk-nul-0000\x00"}, {"key"}),
        ({"label": ""}, {"label"}),
        ({"label": "l" * 101}, {"label"}),
        ({"label": " l"}, {"label"}),
        ({"label": "a\nb"}, {"label"}),
        ({"label": "a\u202eb"}, {"label"}),
        ({"label": "\ud800"}, {"label"}),
        ({"label": None}, {"label"}),
        ({"label": f"mine: {API_KEY}"}, {"label"}),
        ({"mode": "platform_key"}, {"mode"}),
        ({"mode": ["user_deepseek_key"]}, {"mode"}),
        ({"key": "", "label": 1, "mode": None}, {"key", "label", "mode"}),
    ],
)
def test_invalid_key_label_or_mode_is_named_and_not_repeated(
    sqlite_kit: Kit, fields: dict[str, Any], named: set[str]
) -> None:
    with pytest.raises(InputInvalid) as refused:
        sqlite_kit.services.credentials.create("u1", **{"key": API_KEY, **fields})
    assert refused.value.details is not None
    assert {fault["field"] for fault in refused.value.details["fields"]} == named
    assert API_KEY not in str(refused.value.details)
    assert not sqlite_kit.counts()


def test_key_and_label_at_their_limits_are_accepted(kit: Kit) -> None:
    service = kit.services.credentials
    taken: list[Credential] = [
        service.create("学生", "!~" * 4, "💡" * 100),
        service.create("学生", "~" * 512, "DeepSeek — 我的"),
    ]
    assert service.list_own("学生") == taken[::-1]
    assert [service.resolve(one.id).api_key for one in taken] == ["!~" * 4, "~" * 512]
