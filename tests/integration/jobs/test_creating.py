"""A job is created whole or not at all, and input that can't be stored is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from aijobs.canonical import MAX_DEPTH, canonical_bytes, canonical_hash
from aijobs.credentials.models import UserModelCredential
from aijobs.definitions.errors import UnknownJobType
from aijobs.errors import InputInvalid
from aijobs.ids import new_id
from aijobs.jobs.lease import JobErrorInfo
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreateJobInput, Overrides
from tests.support.jobs import BEGIN, Kit
from tests.support.rows import job_columns

WHOLE = {"ai_jobs": 1, "ai_job_snapshots": 1, "ai_job_events": 1, "outbox_events": 1, "quota_usage": 1}


class Fault(Exception):
    """The error that a test injects."""


@contextmanager
def fault_at(kit: Kit, number: int, error: Exception, *, times: int = 1) -> Iterator[list[str]]:
    """Raise `error` at the `number`-th writing statement, so many `times`."""
    written: list[str] = []
    left = [times]

    def inject(_conn: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if not statement.startswith(("INSERT", "UPDATE", "WITH")):
            return
        written.append(statement)
        if len(written) >= number and left[0] > 0:
            left[0] -= 1
            written.clear()
            raise error

    event.listen(kit.database.engine, "before_cursor_execute", inject)
    try:
        yield written
    finally:
        event.remove(kit.database.engine, "before_cursor_execute", inject)


def test_new_job_has_a_snapshot_an_event_and_a_history_row(kit: Kit) -> None:
    created = kit.create({"output": {"said": "hello"}, "artifacts": 2}, user_id="u7", priority=3)
    assert created.created
    assert kit.counts() == WHOLE
    row = kit.row(created.job.id)
    assert row["created_at"] == BEGIN
    assert (row["user_id"], row["priority"], row["queue_name"], row["trigger_type"], row["root_id"]) == (
        "u7",
        3,
        "ai-interactive",
        "user",
        created.job.id,
    )
    (snapshot,) = kit.rows("ai_job_snapshots")
    content = {"calls": [{"sleep_ms": 0, "raise": None, "output": {"said": "hello"}, "artifacts": 2}]}
    assert snapshot["content"] == content
    assert snapshot["content_hash"] == canonical_hash(content)
    assert snapshot["content_bytes"] == len(canonical_bytes(content))
    assert snapshot["expires_at"] == BEGIN + timedelta(days=30)
    assert [(line.type, line.actor, line.attempt_no, line.at) for line in kit.history(created.job.id)] == [
        ("created", "user:u7", 0, BEGIN)
    ]
    assert kit.broker.take("ai-interactive").job_id == created.job.id


def test_fault_at_any_statement_leaves_nothing_of_the_job(kit: Kit) -> None:
    kit.create(user_id="u1")  # It creates the user's row, in a transaction of its own.
    before, sent = kit.everything(), kit.broker.pending_count("ai-interactive")
    with fault_at(kit, 99, Fault()) as written:
        assert kit.create(user_id="u1").created
        statements = len(written)
    assert statements >= (1 if kit.database.joins_statements else 4), "job, history, snapshot and event"
    whole = kit.counts()
    before, sent = kit.everything(), kit.broker.pending_count("ai-interactive")
    for number in range(1, statements + 1):
        with fault_at(kit, number, Fault()), pytest.raises(Fault):
            kit.create(user_id="u1")
        assert kit.everything() == before, f"the fault at statement {number} left something"
        assert kit.broker.pending_count("ai-interactive") == sent
    assert kit.create(user_id="u1").created
    assert kit.counts() == {name: count + (name != "quota_usage") for name, count in whole.items()}


def test_deadlock_at_any_statement_is_repeated_with_a_single_effect(kit: Kit) -> None:
    kit.create(user_id="u1")
    with fault_at(kit, 99, Fault()) as written:
        kit.create(user_id="u1")
        statements = len(written)
    for number in range(1, statements + 1):
        before = kit.counts()
        locked = OperationalError("…", None, Exception("database is locked"))
        with fault_at(kit, number, locked, times=2):
            assert kit.create(user_id="u1").created
        assert kit.counts() == {name: count + (name != "quota_usage") for name, count in before.items()}


def test_create_fails_after_five_tries_on_a_locked_database(sqlite_kit: Kit) -> None:
    kit = sqlite_kit
    kit.create(user_id="u1")
    before = kit.everything()
    locked = OperationalError("…", None, Exception("database is locked"))
    with fault_at(kit, 1, locked, times=5), pytest.raises(OperationalError):
        kit.create(user_id="u1")
    assert kit.everything() == before
    with fault_at(kit, 1, locked, times=4):
        assert kit.create(user_id="u1").created


# --- the caller's transaction --------------------------------------------------------------------------------------


def test_job_created_in_a_callers_transaction_is_rolled_back_with_it(kit: Kit) -> None:
    def work(session: Any) -> None:
        job = kit.lifecycle.create_job(session, job_columns())
        kit.services.outbox_events.ask(session, job)
        raise Fault

    with pytest.raises(Fault):
        kit.database.write(work)
    assert kit.counts() == {}


def test_new_job_is_always_queued(sqlite_kit: Kit) -> None:
    kit = sqlite_kit
    with kit.database.transaction() as session:
        job = kit.lifecycle.create_job(session, job_columns(lifecycle_status="succeeded", progress=100, attempt_no=7))
    assert (kit.job(job.id).lifecycle_status, job.progress, job.attempt_no) == ("queued", 0, 0)


MARKS = {
    "mark_succeeded": lambda kit, lease, session: kit.lifecycle.mark_succeeded(lease, session),
    "mark_failed": lambda kit, lease, session: kit.lifecycle.mark_failed(
        lease, JobErrorInfo.of("INTERNAL_ERROR"), session
    ),
    "mark_cancelled": lambda kit, lease, session: kit.lifecycle.mark_cancelled(lease, session),
    "save_output": lambda kit, lease, session: kit.lifecycle.save_output(lease, {"a": 1}, session),
    "release_for_retry": lambda kit, lease, session: kit.lifecycle.release_for_retry(lease, BEGIN, session=session),
    "give_up": lambda kit, lease, session: kit.lifecycle.give_up(
        lease.job_id, 1, JobErrorInfo.of("INTERNAL_NOT_DISPATCHED"), session
    ),
}


@pytest.mark.parametrize("mark", MARKS)
def test_mark_joins_its_callers_session_or_commits_its_own(kit: Kit, mark: str) -> None:
    state = {"mark_cancelled": "cancel_requested", "give_up": "queued"}.get(mark, "running")
    job_id, lease = kit.job_in(state)
    before = kit.everything()

    def rolled_back(session: Any) -> None:
        MARKS[mark](kit, lease, session)
        raise Fault

    with pytest.raises(Fault):
        kit.database.write(rolled_back)
    assert kit.everything() == before, "the caller rolled it back"
    MARKS[mark](kit, lease, None)
    assert kit.row(job_id) != before["ai_jobs"][0]
    assert len(kit.types(job_id)) > len(before["ai_job_events"])


# --- what is refused -----------------------------------------------------------------------------------------------


def refused_fields(kit: Kit, request: CreateJobInput) -> list[str]:
    """Return the fields that a refused request names. No row is written, not even the user's."""
    with pytest.raises(InputInvalid) as refused, kit.statements() as seen:
        kit.jobs.create_job(request)
    assert not [statement for statement in seen if statement.startswith(("INSERT", "UPDATE", "DELETE"))]
    assert all(field["message"] for field in refused.value.details["fields"])
    return [field["field"] for field in refused.value.details["fields"]]


def deep(depth: int) -> Any:
    """Return a list nested so deep."""
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


BAD_OUTPUTS: dict[str, tuple[Any, str]] = {
    "NUL in a value": ({"a": "x\x00y"}, "calls[0].output.a"),
    "NUL in a key": ({"a\x00": 1}, "calls[0].output"),
    "lone surrogate in a value": ({"a": ["\ud800"]}, "calls[0].output.a[0]"),
    "lone surrogate in a key": ({"\udfff": 1}, "calls[0].output"),
    "NaN": ({"a": float("nan")}, "calls[0].output.a"),
    "infinity": ({"a": float("-inf")}, "calls[0].output.a"),
    "overflow": ({"a": 1e999}, "calls[0].output.a"),
    "a huge integer": ({"a": 10**400}, "calls[0].output.a"),
    "an integer beyond 2^53-1": ({"a": 2**53}, "calls[0].output.a"),
    "a negative integer beyond": ({"a": -(2**53)}, "calls[0].output.a"),
}


def test_input_that_some_database_cannot_store_is_refused_by_field(kit: Kit) -> None:
    for bad, (output, field) in BAD_OUTPUTS.items():
        assert refused_fields(kit, kit.request({"output": output})) == [field], bad


def test_input_has_the_same_maximum_depth_on_all_databases(kit: Kit) -> None:
    """MariaDB's JSON has at most 32 levels. The list is below four: the input, its calls, a call and its output."""
    deepest = deep(MAX_DEPTH - 4)
    job = kit.new_job({"output": {"a": deepest}}, idempotency_key="deep")
    (snapshot,) = kit.rows("ai_job_snapshots", job_id=job.id)
    assert snapshot["content"]["calls"][0]["output"] == {"a": deepest}
    for depth in (MAX_DEPTH - 3, 200, 2_000, 50_000):
        (field,) = refused_fields(kit, kit.request({"output": {"a": deep(depth)}}))
        assert field == "calls[0].output.a" + "[0]" * (MAX_DEPTH - 4)


def test_largest_numbers_are_stored_exactly(kit: Kit) -> None:
    kit.create({"output": {"a": 2**53 - 1, "b": -(2**53 - 1), "c": 0.1, "d": 1e300}})
    (snapshot,) = kit.rows("ai_job_snapshots")
    assert snapshot["content"]["calls"][0]["output"] == {"a": 2**53 - 1, "b": -(2**53 - 1), "c": 0.1, "d": 1e300}


IDENTIFIERS = {"user_id": "userId", "target_id": "targetId", "idempotency_key": "Idempotency-Key"}
BAD_IDENTIFIERS = {
    "empty": "",
    "256 characters": "x" * 256,
    "space before": " k",
    "space after": "k ",
    "tab": "k\t",
    "tab within": "k\tk",
    "newline": "k\nk",
    "no-break space": "k\u00a0",
    "ideographic space": "\u3000k",
    "NUL": "k\x00k",
    "C1 control": "k\x85k",
    "DEL": "k\x7f",
    "surrogate": "k\ud800",
}


def test_identifier_that_databases_compare_differently_is_refused_by_name(kit: Kit) -> None:
    for bad, value in BAD_IDENTIFIERS.items():
        for field, name in IDENTIFIERS.items():
            assert refused_fields(kit, kit.request(**{field: value})) == [name], bad


def test_identifiers_of_255_characters_of_any_kind_fit(kit: Kit) -> None:
    for character in ("x", "é", "漢", "\U0001f469", "\U0010ffff"):
        _check_long_name(kit, character * 255)


def _check_long_name(kit: Kit, name: str) -> None:
    job = kit.new_job(user_id=name, target_id=name, idempotency_key=name)
    row = kit.row(job.id)
    assert (row["user_id"], row["target_id"], row["idempotency_key"]) == (name, name, name)
    assert kit.create(user_id=name, target_id=name, idempotency_key=name).job.id == job.id
    kit.lifecycle.request_cancel(job.id, f"user:{name}")
    assert kit.row(job.id)["cancel_requested_by"] == f"user:{name}"
    assert kit.history(job.id)[0].actor == f"user:{name}"


TEXTS = {
    "skin tone": "👩🏽‍💻",
    "the last code point": "\U0010ffff",
    "combining": "e\u0301 ≠ é",
    "right to left": "\u202eabc \u05d0\u05d1",
    "controls": "a\u0001\u0007\u001b[31m\r\n\tb",
    "quotes": "'; DROP TABLE ai_jobs; -- \\ \" %s %(x)s :y",
    "line separators": "\u2028\u2029\u0085",
    "noncharacters": "\ufffe\uffff",
}


def test_any_text_without_nul_is_stored_unchanged(kit: Kit) -> None:
    for text in TEXTS.values():
        _check_text(kit, text)


def _check_text(kit: Kit, text: str) -> None:
    lease = kit.running(input={"calls": [{"output": {text: [text, {"b": text}]}}]})
    kit.lifecycle.save_output(lease, {"said": text, text: 1})
    kit.lifecycle.mark_failed(lease, JobErrorInfo("INTERNAL_ERROR", f"public {text}", f"internal {text}"))
    row = kit.row(lease.job_id)
    assert row["validated_output"] == {"said": text, text: 1}
    assert row["output_hash"] == canonical_hash(row["validated_output"])
    assert (row["public_error_message"], row["internal_error_message"]) == (f"public {text}", f"internal {text}")
    (snapshot,) = kit.rows("ai_job_snapshots", job_id=lease.job_id)
    assert snapshot["content"]["calls"][0]["output"] == {text: [text, {"b": text}]}
    assert snapshot["content_hash"] == canonical_hash(snapshot["content"])


def test_invalid_input_names_each_wrong_field(sqlite_kit: Kit) -> None:
    bad = {"calls": [{"sleep_ms": -1, "artifacts": "2"}, {"unknown": 1}]}
    named = refused_fields(sqlite_kit, sqlite_kit.request(input=bad))
    assert named == ["calls[0].sleep_ms", "calls[0].artifacts", "calls[1].unknown"]
    assert refused_fields(sqlite_kit, sqlite_kit.request(input={})) == ["calls"]


def test_unknown_type_is_refused_before_any_statement(sqlite_kit: Kit) -> None:
    with sqlite_kit.statements() as seen, pytest.raises(UnknownJobType):
        sqlite_kit.create(job_type="nope", idempotency_key="k")
    assert seen == []
    assert sqlite_kit.counts() == {}


def test_hyphen_in_a_job_type_is_an_underscore(sqlite_kit: Kit) -> None:
    assert sqlite_kit.new_job(job_type="synthetic-background").job_type == "synthetic_background"


# --- overrides -----------------------------------------------------------------------------------------------------


def test_each_override_is_stored_in_its_column(kit: Kit) -> None:
    credential = _credential(kit, "u1")
    job = kit.new_job(
        priority=0, credential_mode="user_deepseek_key", credential_id=credential, output_schema_version="1"
    )
    row = kit.row(job.id)
    assert (row["priority"], row["credential_mode"], row["credential_id"], row["output_schema_version"]) == (
        0,
        "user_deepseek_key",
        credential,
        "1",
    )
    assert {field.name for field in fields(Overrides)} == {
        "priority",
        "credential_mode",
        "credential_id",
        "prompt_version",
        "output_schema_version",
    }


BAD_OVERRIDES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "priority below": ({"priority": -1}, ["priority"]),
    "priority above": ({"priority": 101}, ["priority"]),
    "priority of another type": ({"priority": True}, ["priority"]),
    "priority with a fraction": ({"priority": 1.5}, ["priority"]),
    "mode": ({"credential_mode": "theirs"}, ["credentialMode", "credentialId"]),
    "empty mode": ({"credential_mode": ""}, ["credentialMode", "credentialId"]),
    "no credential": ({"credential_mode": "user_deepseek_key"}, ["credentialId"]),
    "credential without mode": ({"credential_id": "x"}, ["credentialId"]),
    "credential that nobody has": ({"credential_mode": "user_deepseek_key", "credential_id": "x"}, ["credentialId"]),
    "NUL in a credential": ({"credential_mode": "user_deepseek_key", "credential_id": "\x00"}, ["credentialId"]),
    "surrogate in a credential": (
        {"credential_mode": "user_deepseek_key", "credential_id": "\ud800"},
        ["credentialId"],
    ),
    "prompt of a type without prompts": ({"prompt_version": "v1"}, ["promptVersion"]),
    "output version": ({"output_schema_version": "2"}, ["outputSchemaVersion"]),
    "empty output version": ({"output_schema_version": ""}, ["outputSchemaVersion"]),
    "two at once": ({"priority": 900, "output_schema_version": "2"}, ["priority", "outputSchemaVersion"]),
}


def test_override_is_checked_like_its_default(kit: Kit) -> None:
    kit.create()  # It creates the user's row, which is locked before a credential is read.
    for bad, (overrides, named) in BAD_OVERRIDES.items():
        assert refused_fields(kit, kit.request(**overrides)) == named, bad
        assert refused_fields(kit, kit.request(idempotency_key="k", **overrides)) == named, bad


def test_another_users_credential_is_refused(kit: Kit) -> None:
    credential = _credential(kit, "u2")
    kit.create()
    request = kit.request(credential_mode="user_deepseek_key", credential_id=credential)
    assert refused_fields(kit, request) == ["credentialId"]


def test_job_outlives_its_deleted_credential(kit: Kit) -> None:
    credential = _credential(kit, "u1")
    job = kit.new_job(credential_mode="user_deepseek_key", credential_id=credential)
    with kit.database.transaction() as session:
        session.delete(session.get_one(UserModelCredential, credential))
    assert (kit.job(job.id).credential_id, kit.job(job.id).credential_mode) == (None, "user_deepseek_key")


def _credential(kit: Kit, user_id: str) -> str:
    credential_id = new_id()
    with kit.database.transaction() as session:
        session.add(
            UserModelCredential(
                id=credential_id,
                user_id=user_id,
                mode="user_deepseek_key",
                label="mine",
                last_four="1234",
                fingerprint="f" * 64,
                key_id="k1",
                ciphertext=b"\x00\xff",
                created_at=BEGIN,
            )
        )
    return credential_id


def test_job_is_created_while_the_broker_is_unavailable(kit: Kit) -> None:
    kit.broker.away = True
    job = kit.new_job()
    assert isinstance(job, AiJob)
    assert kit.counts() == WHOLE
