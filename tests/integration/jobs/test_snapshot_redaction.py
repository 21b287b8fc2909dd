"""A job's input is redacted before it is stored. A repeat of the same request still finds its job."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import update

from aijobs.canonical import canonical_bytes, canonical_hash
from aijobs.errors import ApiError
from aijobs.jobs.models import AiJobSnapshot
from aijobs.jobs.requests import CreateJobInput
from aijobs.learning.models import FLASHCARD_GENERATION
from tests.support.jobs import Kit

CANARIES = ("canary@example.org", "13800138000", "sk-CANARYcanary1234", "hunter2canary", "4111 1111 1111 1111")


def notes(**changes: Any) -> dict[str, Any]:
    text = "Ask canary@example.org or 13800138000. Her key is sk-CANARYcanary1234, password=hunter2canary."
    return {
        "lang": "en",
        "source": {"id": "note-1", "title": "Paid with 4111 1111 1111 1111"},
        "segments": [{"sid": "p1", "text": text}, {"sid": "p2", "text": "Write to canary@example.org again."}],
        **changes,
    }


def request(content: dict[str, Any], key: str | None = None) -> CreateJobInput:
    return CreateJobInput("u1", FLASHCARD_GENERATION, "note", "note-1", content, key)


def snapshot(kit: Kit, job_id: str) -> dict[str, Any]:
    (row,) = kit.rows("ai_job_snapshots", job_id=job_id)
    return row


def test_no_table_holds_what_the_rules_mask(kit: Kit) -> None:
    job = kit.jobs.create_job(request(notes(), "k1")).job
    everything = json.dumps(kit.everything(), default=str, ensure_ascii=False)
    assert not [canary for canary in CANARIES if canary in everything]
    row = snapshot(kit, job.id)
    assert row["redaction_version"] == "r1"
    assert row["redaction_counts"] == {"card": 1, "email": 2, "key": 1, "phone": 1, "secret": 1}
    text = "Ask [EMAIL_1] or [PHONE_1]. Her key is [KEY_1], password=[SECRET_1]."
    assert row["content"]["segments"] == [
        {"sid": "p1", "text": text},
        {"sid": "p2", "text": "Write to [EMAIL_1] again."},
    ]


def test_hash_and_size_are_of_the_redacted_content(kit: Kit) -> None:
    row = snapshot(kit, kit.jobs.create_job(request(notes())).job.id)
    assert row["content_hash"] == canonical_hash(row["content"])
    assert row["content_bytes"] == len(canonical_bytes(row["content"]))


def test_request_hash_is_of_the_unredacted_input(sqlite_kit: Kit) -> None:
    first = sqlite_kit.jobs.create_job(request(notes(), "k1"))
    again = sqlite_kit.jobs.create_job(request(notes(), "k1"))
    assert (again.job.id, again.created) == (first.job.id, False)
    masked = snapshot(sqlite_kit, first.job.id)["content"]
    other = notes(segments=[{"sid": "p1", "text": "Ask another@example.org."}])
    for content in (masked, other):
        with pytest.raises(ApiError, match="IDEMPOTENCY_KEY_REUSED"):
            sqlite_kit.jobs.create_job(request(content, "k1"))


def test_retry_copies_the_snapshot_and_its_redaction_counts(sqlite_kit: Kit) -> None:
    parent = sqlite_kit.jobs.create_job(request(notes())).job
    sqlite_kit.jobs.cancel(parent.id, by="u1")
    child = sqlite_kit.jobs.retry(parent.id, by="operator:ada").job
    before, after = snapshot(sqlite_kit, parent.id), snapshot(sqlite_kit, child.id)
    for column in ("content", "content_hash", "content_bytes", "redaction_version", "redaction_counts"):
        assert after[column] == before[column], column
    assert after["redaction_counts"]["email"] == 2


def test_retry_redacts_a_snapshot_that_older_rules_made(sqlite_kit: Kit) -> None:
    parent = sqlite_kit.jobs.create_job(request(notes())).job
    sqlite_kit.jobs.cancel(parent.id, by="u1")
    old = {"content": notes(), "redaction_version": "r0", "redaction_counts": {}}
    sqlite_kit.database.write(
        lambda s: s.execute(update(AiJobSnapshot).where(AiJobSnapshot.job_id == parent.id).values(**old)).rowcount
    )
    child = snapshot(sqlite_kit, sqlite_kit.jobs.retry(parent.id, by="operator:ada").job.id)
    assert (child["redaction_version"], child["redaction_counts"]["email"]) == ("r1", 2)
    assert not [canary for canary in CANARIES if canary in json.dumps(child["content"])]
    assert child["content_hash"] == canonical_hash(child["content"])
