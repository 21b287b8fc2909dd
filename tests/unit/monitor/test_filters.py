"""The filter language: parsed from addresses and written into links."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aijobs.errors import InputInvalid
from aijobs.monitor.filters import PARAMETERS, JobFilter, _successor

FULL = JobFilter(
    job_type="flashcard_generation",
    lifecycle_status="failed",
    queue_name="ai-background",
    user_id="学生 1",
    error_code="TIMEOUT",
    created_from=datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC),
    created_to=datetime(2026, 2, 2, tzinfo=UTC),
    q="018f",
    unresolved=True,
)


def test_query_of_a_filter_is_parsed_to_the_same_filter() -> None:
    assert JobFilter.parse(FULL.query()) == FULL
    assert set(FULL.query()) == set(PARAMETERS) - {"status"}
    assert JobFilter().query() == {}


def test_query_of_a_filter_may_change_or_drop_a_field() -> None:
    changed = FULL.query(lifecycle_status="queued", user_id=None, unresolved=False)
    assert changed["lifecycleStatus"] == "queued"
    assert not {"userId", "unresolved"} & set(changed)


def test_empty_fields_of_a_form_do_not_filter() -> None:
    assert JobFilter.parse(dict.fromkeys(PARAMETERS, "")) == JobFilter()


def test_job_type_with_hyphens_means_underscores() -> None:
    assert JobFilter.parse({"jobType": "active-recall"}).job_type == "active_recall"


def test_status_is_an_alias_of_lifecycle_status_and_may_not_contradict_it() -> None:
    assert JobFilter.parse({"status": "failed"}) == JobFilter.parse({"lifecycleStatus": "failed"})
    assert JobFilter.parse({"status": "failed", "lifecycleStatus": "failed"}).lifecycle_status == "failed"
    with pytest.raises(InputInvalid):
        JobFilter.parse({"status": "failed", "lifecycleStatus": "queued"})


@pytest.mark.parametrize(
    ("text", "begin", "end"),
    [
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=UTC), datetime(2026, 2, 1, tzinfo=UTC)),
        ("2026-01-31T08:00", datetime(2026, 1, 31, 8, tzinfo=UTC), datetime(2026, 1, 31, 8, tzinfo=UTC)),
        ("2026-01-31T08:00:00+08:00", datetime(2026, 1, 31, tzinfo=UTC), datetime(2026, 1, 31, tzinfo=UTC)),
    ],
)
def test_date_means_the_whole_day(text: str, begin: datetime, end: datetime) -> None:
    wanted = JobFilter.parse({"createdFrom": text, "createdTo": text})
    assert (wanted.created_from, wanted.created_to) == (begin, end)


def test_all_invalid_filters_are_named_together() -> None:
    with pytest.raises(InputInvalid) as refused:
        JobFilter.parse({"jobType": "A", "queueName": "x", "createdTo": "tomorrow", "q": "ok"})
    assert [each["field"] for each in refused.value.details["fields"]] == ["jobType", "queueName", "createdTo"]


@given(st.text(min_size=1), st.text())
def test_every_text_with_a_prefix_sorts_before_the_prefix_successor(start: str, rest: str) -> None:
    end = _successor(start)
    assert end is None or start + rest < end
    if end is not None:
        end.encode()


@given(st.text(min_size=1), st.text())
def test_range_of_a_prefix_contains_no_other_text(start: str, other: str) -> None:
    end = _successor(start)
    if start <= other and (end is None or other < end):
        assert other.startswith(start)
