"""Repeated requests over HTTP: the Idempotency-Key is looked up before the body is validated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from flask.testing import FlaskClient
from pydantic import BaseModel, ConfigDict

from aijobs.definitions.definition import Input
from aijobs.job_types import flashcard_generation
from aijobs.wiring.services import Services
from tests.web.api.conftest import as_user

NOTES = flashcard_generation.SAMPLE_INPUT


class StricterInput(BaseModel):
    """A possible later schema of the flashcard request."""

    model_config = ConfigDict(extra="forbid")

    text: str


def ask(client: FlaskClient, body: dict[str, Any], key: str) -> Any:
    headers = {**as_user(), "Idempotency-Key": key}
    return client.post("/api/learning/flashcards", json=body, headers=headers)


def test_repeat_gets_its_job_even_if_the_current_schema_refuses_its_body(
    client: FlaskClient, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask(client, NOTES, "k")
    assert first.status_code == 202
    changed = replace(flashcard_generation.DEFINITION, input=Input("2", StricterInput))
    monkeypatch.setattr(services.registry, "get", lambda job_type: changed)
    again = ask(client, NOTES, "k")
    assert (again.status_code, again.json["jobId"]) == (200, first.json["jobId"])
    assert ask(client, NOTES, "another").status_code == 422


@pytest.mark.parametrize(
    "changes",
    [
        {"source": {"id": "x ", "title": "Plants"}},
        {"source": {"id": 5, "title": "Plants"}},
        {"source": {"id": "x" * 256, "title": "Plants"}},
        {"source": None},
        {"segments": []},
        {"credentialId": 5},
        {"credentialId": None},
        {"credentialId": "nobody's"},
        {"unknown": 1},
    ],
)
def test_used_key_with_an_invalid_body_is_a_reused_key(client: FlaskClient, changes: dict[str, Any]) -> None:
    first = ask(client, NOTES, "k")
    answer = ask(client, {**NOTES, **changes}, "k")
    assert (answer.status_code, answer.json["error"]["code"]) == (409, "IDEMPOTENCY_KEY_REUSED")
    assert answer.json["error"]["details"]["jobId"] == first.json["jobId"]
    assert ask(client, {**NOTES, **changes}, "another").status_code == 422
