"""The states and the phases derived from them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from aijobs.jobs.lease import JobErrorInfo, Lease, LeasePolicy
from aijobs.jobs.status import END_EVENTS, FINAL, OPEN, STATUS_TO_LIFECYCLE, JobState, Phase, phase


@dataclass
class Row:
    """The columns that a phase is derived from."""

    lifecycle_status: str
    locked_by: str | None = None
    cancel_requested_at: datetime | None = None


def test_five_states_are_stored_and_three_are_final() -> None:
    assert list(JobState) == ["queued", "running", "succeeded", "failed", "cancelled"]
    assert {*JobState} - {*OPEN} == FINAL
    assert set(END_EVENTS) == FINAL


def test_legacy_names_map_to_their_states() -> None:
    assert STATUS_TO_LIFECYCLE == {
        "pending": "queued",
        "processing": "running",
        "completed": "succeeded",
        "failed": "failed",
        "cancelled": "cancelled",
        "cancel_requested": "cancelled",
    }


AT = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("row", "published", "expected"),
    [
        (Row("queued"), False, "created"),
        (Row("queued"), True, "queued"),
        (Row("running", "w"), True, "running"),
        (Row("running", "w"), False, "running"),
        (Row("running"), True, "retrying"),
        (Row("running", "w", AT), True, "cancel_requested"),
        (Row("succeeded"), True, "succeeded"),
        (Row("failed"), True, "failed"),
        (Row("cancelled", None, AT), True, "cancelled"),
    ],
)
def test_phase_is_derived_from_the_row(row: Row, published: bool, expected: str) -> None:
    assert phase(row, published) == expected
    assert expected in [*Phase]


def test_lease_names_the_instance_of_its_token() -> None:
    assert Lease("j", "host~boot~ns~1~2~ab/0123", 1).instance == "host~boot~ns~1~2~ab"


def test_lease_counts_as_lost_after_length_and_grace() -> None:
    from datetime import timedelta

    assert LeasePolicy(timedelta(seconds=60), timedelta(seconds=30)).threshold_ms == 90_000


def test_error_info_has_the_public_message_of_its_code() -> None:
    info = JobErrorInfo.of("TIMEOUT", "inner")
    assert (info.code, info.internal_message) == ("TIMEOUT", "inner")
    assert "took too long" in info.public_message
