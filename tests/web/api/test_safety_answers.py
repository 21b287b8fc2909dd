"""Messages to users whose notes were refused, and redaction counts for operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from aijobs.jobs.lease import JobErrorInfo, lease_of
from aijobs.wiring.services import Services
from tests.web.api.conftest import Person, as_user

NOTES = {
    "lang": "en",
    "source": {"id": "n1", "title": "Notes"},
    "segments": [{"sid": "p1", "text": "Ask canary@example.org, or canary@example.org, or 13800138000."}],
}


def new_job(client: FlaskClient) -> str:
    answer = client.post("/api/learning/flashcards", json=NOTES, headers=as_user())
    assert answer.status_code == 202, answer.json
    return str(answer.json["jobId"])  # type: ignore[index]


@pytest.mark.parametrize(
    ("language", "words"), [("en", "please talk to someone you trust"), ("zh-CN", "请和信任的人谈谈")]
)
def test_user_at_risk_of_self_harm_reads_a_supportive_message(
    client: FlaskClient, services: Services, language: str, words: str
) -> None:
    job_id = new_job(client)
    lease = lease_of(services.lifecycle.lock_job(job_id, "worker").job)
    services.lifecycle.mark_failed(lease, JobErrorInfo("CONTENT_SAFETY_SELF_HARM", "public", "rule zh-self-harm"))
    answer: Any = client.get(f"/api/ai/jobs/{job_id}", headers={**as_user(), "Accept-Language": language}).json
    assert answer["errorCode"] == "CONTENT_SAFETY_SELF_HARM"
    assert words in answer["publicErrorMessage"]
    assert "block" not in answer["publicErrorMessage"].lower()
    assert "rule" not in answer["publicErrorMessage"]


def test_operator_sees_redaction_counts_by_rule(client: FlaskClient, operator: Callable[[str], Person]) -> None:
    headers = operator("VIEWER").headers
    answer: Any = client.get(f"/admin-api/ai/jobs/{new_job(client)}", headers=headers)
    assert answer.json["snapshot"]["redactionVersion"] == "r1"
    assert answer.json["snapshot"]["redactionCounts"] == {"email": 2, "phone": 1}
    assert "canary" not in answer.get_data(as_text=True)
