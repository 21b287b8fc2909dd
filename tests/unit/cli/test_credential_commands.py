"""`aijobs credentials rotate`, and the refusal to start without a needed key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import select, update

from aijobs.credentials.models import UserModelCredential
from aijobs.credentials.service import CredentialService
from aijobs.db.clock import DatabaseClock
from aijobs.db.database import Database
from aijobs.operators.models import AuditLog
from aijobs.settings import Settings
from aijobs.wiring.stores import build_credential_store

Aijobs = Callable[..., tuple[int, str, str]]
KEY = "sk-canary-0123456789abcdef"
K1, K2 = "k1:" + "1" * 32, "k2:" + "2" * 32


@contextmanager
def opened() -> Iterator[Database]:
    database = Database(Settings.load().database_url)
    yield database
    database.dispose()


def store(count: int) -> list[str]:
    """Store `count` keys with the ring that is set now; return their ids."""
    settings, clock = Settings.load(), DatabaseClock()
    with opened() as database:
        service = CredentialService(database, clock, build_credential_store(settings, clock))
        return [service.create("u1", KEY).id for _ in range(count)]


def key_ids() -> set[str]:
    with opened() as database, database.read() as session:
        return set(session.execute(select(UserModelCredential.key_id)).scalars())


def test_credentials_are_rotated_from_the_command_line(upgraded: Aijobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIJOBS_CREDENTIAL_KEYS", K1)
    store(2)
    monkeypatch.setenv("AIJOBS_CREDENTIAL_KEYS", f"{K2},{K1}")
    store(1)
    assert upgraded("credentials", "rotate") == (
        0,
        "2 stored keys encrypted anew under k2\nEvery stored key is under k2: the older ones of the ring may go.\n",
        "",
    )
    assert key_ids() == {"k2"}
    monkeypatch.setenv("AIJOBS_CREDENTIAL_KEYS", K2)
    code, out, _ = upgraded("credentials", "rotate", "--json")
    done = {"keyId": "k2", "rotated": 0, "unreadable": [], "remaining": 0, "isComplete": True}
    assert (code, json.loads(out)) == (0, done)
    with opened() as database, database.read() as session:
        rows = session.execute(select(AuditLog).order_by(AuditLog.at, AuditLog.id)).scalars().all()
    assert [(row.action, row.target_id, row.after["rotated"]) for row in rows] == [
        ("credential.rotate", "k2", 2),
        ("credential.rotate", "k2", 0),
    ]
    assert all(row.actor.startswith("cli:") for row in rows)


def test_unreadable_credential_is_named_and_the_exit_code_is_1(
    upgraded: Aijobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIJOBS_CREDENTIAL_KEYS", K1)
    bad, _good = store(2)
    with opened() as database, database.transaction() as session:
        session.execute(
            update(UserModelCredential).where(UserModelCredential.id == bad).values(ciphertext=b"\x01garbled")
        )
    monkeypatch.setenv("AIJOBS_CREDENTIAL_KEYS", f"{K2},{K1}")
    code, out, err = upgraded("credentials", "rotate")
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        "1 stored key encrypted anew under k2",
        f"can't be decrypted: {bad}",
        "1 stored key under other keys: keep the ring as it is.",
    ]
    code, out, _ = upgraded("credentials", "rotate", "--json")
    assert (code, json.loads(out)["unreadable"], json.loads(out)["remaining"]) == (1, [bad], 1)
    monkeypatch.setenv("AIJOBS_CREDENTIAL_KEYS", K2)
    code, out, _ = upgraded("credentials", "rotate", "--json")
    assert (code, json.loads(out)["unreadable"]) == (1, [bad])
    assert KEY not in out


def test_up_is_refused_in_one_line_without_a_needed_ring_key(upgraded: Aijobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIJOBS_CREDENTIAL_KEYS", K1)
    store(3)
    monkeypatch.setenv("AIJOBS_CREDENTIAL_KEYS", K2)
    why = "AIJOBS_CREDENTIAL_KEYS lacks what 3 stored user keys need: 'k1' (3); put it back behind the newest"
    code, _out, err = upgraded("up")
    assert (code, err) == (1, f"aijobs: {why}\n")
