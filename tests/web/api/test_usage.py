"""Tokens and cost over HTTP: exact sums, grouping and permissions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from aijobs.db.database import Database
from tests.support.rows import BEGIN, add, build_call, build_job, ended
from tests.web.api.conftest import Person

USAGE = "/admin-api/ai/usage"
PERIOD = f"from={BEGIN.date()}&to={BEGIN.date()}"
UNPRICED = {"cost_micros": None, "currency": None}
SPENT = {"promptTokens", "completionTokens", "cachedTokens", "costMicros", "currency", "priceVersion"}


@pytest.fixture
def chain(database: Database) -> list[Any]:
    """Add a failed job with a priced, an unpriced and a lost call, and its successful retry."""
    parent = build_job(**ended("failed"))
    child = build_job(parent_job_id=parent.id, root_id=parent.id, **ended("succeeded"))
    add(
        database,
        parent,
        child,
        build_call(parent, cost_micros=9_007_199_254_740_991, http_status=200, request_id="req-1", cached_tokens=4),
        build_call(parent, call_no=2, **UNPRICED),
        build_call(parent, call_no=3, state="lost", billed="unknown", **UNPRICED),
        build_call(child, cost_micros=1),
    )
    return [parent, child]


@pytest.fixture
def ask(client: FlaskClient, operator: Callable[[str], Person]) -> Callable[..., Any]:
    headers = {role: operator(role).headers for role in ("VIEWER", "OPERATOR")}
    return lambda address, role="OPERATOR": client.get(address, headers=headers[role])


def test_usage_is_summed_by_day_and_in_total_without_floats(ask: Callable[..., Any], chain: list[Any]) -> None:
    answer = ask(f"{USAGE}?{PERIOD}")
    body = json.loads(answer.text, parse_float=lambda text: pytest.fail(f"{text} is no whole number"))
    total = {
        "calls": 4,
        "failedCalls": 1,
        "lostCalls": 1,
        "callsUnderWay": 0,
        "promptTokens": 40,
        "completionTokens": 20,
        "cachedTokens": 4,
        "costs": [{"currency": "USD", "costMicros": 9_007_199_254_740_992}],
        "unpricedCalls": 2,
        "estimatedCalls": 0,
        "possiblyBilledCalls": 1,
    }
    assert body == {
        "from": "2026-03-01T00:00:00.000Z",
        "to": "2026-03-02T00:00:00.000Z",
        "groupBy": "day",
        "groups": [{"day": "2026-03-01", **total}],
        "more": False,
        "total": total,
    }


@pytest.mark.parametrize(
    ("group_by", "expected"),
    [
        ("jobType", {"jobType": "synthetic"}),
        ("provider", {"provider": "local"}),
        ("model", {"provider": "local", "model": "m"}),
        ("user", {"userId": "u1"}),
    ],
)
def test_group_has_only_the_keys_that_were_asked_for(
    ask: Callable[..., Any], chain: list[Any], group_by: str, expected: dict[str, str]
) -> None:
    (group,) = ask(f"{USAGE}?{PERIOD}&groupBy={group_by}&userId=u1").json["groups"]
    assert {
        name: group[name] for name in group if name in ("day", "jobType", "provider", "model", "userId")
    } == expected
    assert ask(f"{USAGE}?{PERIOD}&groupBy={group_by}&userId=U1").json["groups"] == []


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("groupBy=hour", "groupBy"),
        ("from=then", "from"),
        ("from=2026-03-02&to=2026-03-01T00:00:00Z", "from"),
        ("from=2024-01-01&to=2026-01-01", "from"),
        ("to=", "to"),
        ("userId=%20a", "userId"),
        ("jobType=A!", "jobType"),
        ("user=u1", "user"),
        ("groupBy=day&groupBy=user", "groupBy"),
    ],
)
def test_invalid_usage_parameter_is_named(ask: Callable[..., Any], query: str, named: str) -> None:
    answer = ask(f"{USAGE}?{query}")
    assert answer.status_code == 422
    assert [fault["field"] for fault in answer.json["error"]["details"]["fields"]] == [named]


def test_cost_of_a_job_and_its_chain_is_shown_only_with_permission(ask: Callable[..., Any], chain: list[Any]) -> None:
    parent, child = chain
    body = ask(f"/admin-api/ai/jobs/{child.id}").json
    assert (body["usageTotal"]["costs"], body["usageTotal"]["unpricedCalls"]) == (
        [{"currency": "USD", "costMicros": 1}],
        0,
    )
    assert body["chainTotal"]["costs"] == [{"currency": "USD", "costMicros": 9_007_199_254_740_992}]
    calls = ask(f"/admin-api/ai/jobs/{parent.id}").json["usage"]
    assert (calls[0]["httpStatus"], calls[0]["requestId"]) == (200, "req-1")
    assert [call["costMicros"] for call in calls] == [9_007_199_254_740_991, None, None]
    seen = ask(f"/admin-api/ai/jobs/{parent.id}", "VIEWER").json
    assert not {"usageTotal", "chainTotal"} & set(seen)
    assert [call["state"] for call in seen["usage"]] == ["done", "done", "lost"]
    assert not SPENT & {name for call in seen["usage"] for name in call}
    assert ask(USAGE, "VIEWER").status_code == 403
