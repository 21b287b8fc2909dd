"""A job's page shows how often its input was redacted, but not the redacted text."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from aijobs.jobs.models import AiJobSnapshot
from aijobs.screening.sensitive import FINDERS
from aijobs.web.console.words import REDACTION_WORDS
from tests.web.console.stage import Stage


@pytest.mark.parametrize(
    ("language", "words", "nothing"),
    [("en", "Email addresses masked: 2", "nothing was masked"), ("zh", "已遮盖邮箱地址: 2", "没有需要遮盖的内容")],
)
def test_redaction_counts_are_shown_in_both_languages(stage: Stage, language: str, words: str, nothing: str) -> None:
    job_id = stage.queued()
    console = stage.client("VIEWER", language)
    assert nothing in console.soup(f"/console/jobs/{job_id}").find("main").get_text()
    counted = update(AiJobSnapshot).where(AiJobSnapshot.job_id == job_id).values(redaction_counts={"email": 2})
    stage.services.database.write(lambda session: session.execute(counted).rowcount)
    page = console.soup(f"/console/jobs/{job_id}").find("main").get_text()
    assert words in page
    assert nothing not in page


def test_every_redaction_rule_has_a_label() -> None:
    assert set(REDACTION_WORDS) == {kind.lower() for kind, _ in FINDERS}
