"""Random requests: no answer is a 5xx, and every refusal has the same shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from flask.testing import FlaskClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aijobs.errors import CODES
from aijobs.web.api import admin, user
from tests.web.api.conftest import Person, as_user

FUZZ = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

TEXTS = st.text(alphabet=st.characters(exclude_categories=()), max_size=40)
NUMBERS = st.one_of(st.integers(), st.floats(), st.integers(min_value=2**53, max_value=2**80))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=12,
)
NOTES = st.fixed_dictionaries(
    {},
    optional={
        "lang": st.one_of(st.sampled_from(["en", "zh"]), JSON),
        "source": st.one_of(st.fixed_dictionaries({"id": TEXTS, "title": TEXTS}), JSON),
        "segments": st.one_of(st.lists(st.fixed_dictionaries({"sid": TEXTS, "text": TEXTS}), max_size=3), JSON),
        "options": JSON,
        "extra": JSON,
    },
)
BODIES = st.one_of(st.binary(max_size=60), st.one_of(JSON, NOTES).map(lambda value: json.dumps(value).encode()))
OPERATIONS = [*user.OPERATIONS, *admin.OPERATIONS]
PARAMETERS = sorted({name for operation in OPERATIONS for name in operation.parameters} | {"strict", "x"})


def check(answer: Any) -> None:
    assert answer.status_code < 500, answer.get_data()
    if answer.status_code >= 400:
        error = answer.json["error"]
        assert error["code"] in CODES
        assert error["message"]
        assert set(error) <= {"code", "message", "details"}


@pytest.fixture
def boss(operator: Callable[[str], Person]) -> Person:
    return operator("SUPER_ADMIN")


@FUZZ
@given(body=BODIES, key=st.one_of(st.none(), TEXTS))
def test_any_body_is_accepted_or_refused(client: FlaskClient, body: bytes, key: str | None) -> None:
    header = {} if key is None else {"HTTP_IDEMPOTENCY_KEY": key.encode("utf-8", "surrogatepass").decode("latin-1")}
    check(
        client.post(
            "/api/learning/flashcards",
            data=body,
            content_type="application/json",
            headers=as_user(),
            environ_overrides=header,
        )
    )


@FUZZ
@given(
    operation=st.sampled_from(OPERATIONS),
    part=TEXTS.filter(bool),
    parameters=st.dictionaries(st.sampled_from(PARAMETERS), TEXTS, max_size=3),
    body=BODIES,
)
def test_any_path_and_parameters_are_answered_or_refused(
    client: FlaskClient,
    boss: Person,
    operation: Any,
    part: str,
    parameters: dict[str, str],
    body: bytes,
) -> None:
    def spell(text: str) -> str:
        return quote(text.encode("utf-8", "surrogatepass"), safe="")

    path = operation.path.replace("{jobId}", spell(part)).replace("{eventId}", spell(part))
    query = "&".join(f"{name}={spell(value)}" for name, value in parameters.items())
    headers = boss.headers if operation.path.startswith("/admin-api") else as_user()
    data = body if operation.method == "POST" else None
    answer = client.open(
        f"{path}?{query}", method=operation.method, headers=headers, data=data, content_type="application/json"
    )
    check(answer)
