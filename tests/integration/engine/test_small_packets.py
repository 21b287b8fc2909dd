"""MariaDB with `max_allowed_packet` of 1 MiB: larger values are refused, and no answer is paid for twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy.orm import Session

from aijobs.db.clock import ManualClock
from aijobs.definitions.definition import Output
from aijobs.errors import ApiError, SettingsError
from aijobs.job_types import flashcard_generation
from aijobs.jobs.requests import CreateJobInput
from tests.integration.engine.stage import CARDS, Stage, Writing, card_row, open_stage
from tests.support.databases import MariaDbServer
from tests.support.jobs import BEGIN, Kit, open_kit, prepare_database

pytestmark = pytest.mark.mariadb
PACKET = 1024 * 1024


class Text(BaseModel):
    """An answer of any length."""

    text: str


@pytest.fixture
def small_kit(mariadb: MariaDbServer) -> Iterator[Kit]:
    """Open a kit over a server whose `max_allowed_packet` is 1 MiB."""
    mariadb.ensure_running()
    url = mariadb.create_database(prepare_database)
    before = set_packet(mariadb, PACKET)
    try:
        with open_kit(url, clock=ManualClock(BEGIN)) as kit:
            yield kit
    finally:
        set_packet(mariadb, before)
        mariadb.drop_database(url)


def set_packet(server: MariaDbServer, size: int) -> int:
    """Set the server's limit for new connections and return the old one."""
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SELECT @@global.max_allowed_packet")
        before = int(cursor.fetchone()[0])
        cursor.execute(f"SET GLOBAL max_allowed_packet = {size}")
    return before


@pytest.fixture
def small_stage(small_kit: Kit) -> Iterator[Stage]:
    with open_stage(small_kit) as opened:
        yield opened


def texts(stage: Stage) -> str:
    """Register a job type whose answers may be of any length."""
    return stage.define(replace(flashcard_generation.DEFINITION, output=Output("1", Text), projector=None), delay=10)


def of_bytes(size: int) -> str:
    """Return Chinese text of so many bytes."""
    return "\u6e17" * (size // 3)


def test_input_above_max_allowed_packet_is_refused_with_the_limit(small_kit: Kit) -> None:
    before = small_kit.counts()
    with small_kit.statements() as seen, pytest.raises(ApiError) as refused:
        small_kit.new_job({"output": {"text": of_bytes(PACKET)}})
    assert (refused.value.code, refused.value.http_status) == ("PAYLOAD_TOO_LARGE", 413)
    assert refused.value.details is not None
    assert refused.value.details["limit"] == "maxAllowedPacket"
    assert 0 < PACKET - refused.value.details["allowed"] < 64
    written = {name for name, count in small_kit.counts().items() if count != before.get(name)}
    assert written <= {"quota_usage"}, "its row is written in an earlier transaction"
    assert sum("INSERT INTO ai_job_snapshots" in statement for statement in seen) == 1, "no retry"


def test_answer_above_max_allowed_packet_fails_the_job_after_one_call(small_stage: Stage) -> None:
    small_stage.provider.answers[:] = [f'{{"text": "{of_bytes(2_700_000)}"}}']
    job = small_stage.run_to_end(small_stage.new_cards(texts(small_stage)))
    assert (job.lifecycle_status, job.error_code, job.attempt_no) == ("failed", "INTERNAL_CONFIG", 1)
    assert len(small_stage.provider.requests) == 1
    (call,) = small_stage.usage(job.id)
    assert (call["state"], call["billed"], call["prompt_tokens"]) == ("failed", "yes", 100)
    assert call["finished_at"] is not None
    internal = small_stage.kit.row(job.id)["internal_error_message"]
    assert "raise max_allowed_packet" in internal
    assert "\u6e17" not in internal


def test_script_output_above_max_allowed_packet_fails_the_job_at_once(small_stage: Stage) -> None:
    job_type = small_stage.scripted(lambda *_: {"output": {"text": of_bytes(2 * PACKET)}, "artifacts": 0})
    job = small_stage.run_to_end(small_stage.kit.new_job(job_type=job_type).id)
    assert (job.error_code, job.attempt_no) == ("INTERNAL_CONFIG", 1)


def test_projected_row_above_max_allowed_packet_fails_the_job_at_once(small_stage: Stage) -> None:
    def project(session: Session, job: Any) -> None:
        session.add(card_row(job.id, 0, of_bytes(2 * PACKET)))

    job = small_stage.run_to_end(small_stage.new_cards(small_stage.asking(CARDS, projector=Writing(project))))
    assert (job.error_code, job.attempt_no, len(small_stage.provider.requests)) == ("INTERNAL_CONFIG", 1, 1)


def test_input_and_output_just_below_the_limit_are_accepted(small_stage: Stage) -> None:
    kit, text = small_stage.kit, of_bytes(largest(small_stage.kit) - 600)
    definition = replace(
        flashcard_generation.DEFINITION,
        input=replace(flashcard_generation.DEFINITION.input, schema=Text),
        output=Output("1", Text),
        projector=None,
        prompt=None,
        script=lambda job_input, *_: {"text": job_input["text"]},
    )
    request = CreateJobInput("u1", small_stage.define(definition), "note", "note-1", {"text": text})
    job_id = kit.jobs.create_job(request).job.id
    assert small_stage.run(job_id) == "succeeded"
    revealed = kit.services.monitor.reveal(job_id)
    assert (revealed.snapshot["text"], revealed.validated_output["text"]) == (text, text)


def largest(kit: Kit) -> int:
    with pytest.raises(ApiError) as refused:
        kit.new_job({"output": {"text": of_bytes(PACKET)}})
    assert refused.value.details is not None
    return int(refused.value.details["allowed"])


def test_server_with_less_than_a_mebibyte_prevents_the_start(mariadb: MariaDbServer, small_kit: Kit) -> None:
    set_packet(mariadb, PACKET // 2)
    small_kit.database.dispose()
    with pytest.raises(SettingsError, match="max_allowed_packet is 524288 bytes: set it to 1048576") as refused:
        small_kit.services.check_start()
    assert "\n" not in str(refused.value)
