"""The usage filter: parsing, the default period, and refusals by name."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aijobs.errors import InputInvalid
from aijobs.monitor.usage_filter import UsageFilter

NOW = datetime(2026, 3, 30, 13, 14, 15, 999999, tzinfo=UTC)
MIDNIGHT = datetime(2026, 3, 31, tzinfo=UTC)


def test_default_usage_period_is_thirty_days_including_today() -> None:
    wanted = UsageFilter.parse({"from": "", "userId": ""}, NOW)
    assert wanted == UsageFilter(datetime(2026, 3, 1, tzinfo=UTC), MIDNIGHT)


@pytest.mark.parametrize(
    ("given", "since", "until"),
    [
        (
            {"from": "2026-03-05", "to": "2026-03-05"},
            datetime(2026, 3, 5, tzinfo=UTC),
            datetime(2026, 3, 6, tzinfo=UTC),
        ),
        ({"to": "2026-02-28"}, datetime(2026, 1, 30, tzinfo=UTC), datetime(2026, 3, 1, tzinfo=UTC)),
        ({"from": "2026-03-29T22:00:00-02:00"}, MIDNIGHT - timedelta(days=1), MIDNIGHT),
        ({"to": "1970-01-02T00:00:00Z"}, datetime(1970, 1, 1, tzinfo=UTC), datetime(1970, 1, 2, tzinfo=UTC)),
    ],
)
def test_usage_period_has_whole_days_and_respects_offsets(
    given: dict[str, str], since: datetime, until: datetime
) -> None:
    wanted = UsageFilter.parse(given, NOW)
    assert (wanted.since, wanted.until) == (since, until)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"from": "yesterday"}, ["from"]),
        ({"from": "2026-03-02", "to": "2026-03-01T00:00:00Z"}, ["from"]),
        ({"from": "2025-01-01", "to": "2026-03-01"}, ["from"]),
        ({"groupBy": "hour", "userId": " a", "jobType": "!"}, ["userId", "jobType", "groupBy"]),
    ],
)
def test_invalid_usage_filter_is_refused_by_name(given: dict[str, str], named: list[str]) -> None:
    with pytest.raises(InputInvalid) as refused:
        UsageFilter.parse(given, NOW)
    assert list(refused.value.by_field()) == named


def test_query_of_a_usage_filter_is_parsed_to_the_same_filter() -> None:
    given: dict[str, Any] = {"from": "2026-03-05", "userId": "é 1", "jobType": "quiz-generation", "groupBy": "model"}
    wanted = UsageFilter.parse(given, NOW)
    assert UsageFilter.parse(wanted.query(), NOW) == wanted
    assert "groupBy" not in wanted.query(group_by="day")
