"""The catalogues of both languages are complete."""

from __future__ import annotations

import re
from io import BytesIO

import pytest
from babel.messages.mofile import write_mo

from aijobs.errors import CODES, Retried
from aijobs.jobs.history import HistoryType
from aijobs.jobs.status import Phase
from aijobs.operators.models import ROLES
from aijobs.outbox.models import OutboxState
from aijobs.web.console import catalogues
from aijobs.web.console.words import EVENT_WORDS, WORDS
from aijobs.web.explanations import FAILURES, WAITS, explain_failure

_PLACE = re.compile(r"%\(\w+\)s")


def _texts(catalog: object) -> set[object]:
    return {(message.context, message.id) for message in catalog if message.id}  # type: ignore[attr-defined]


@pytest.mark.parametrize("language", catalogues.LANGUAGES)
def test_catalogue_has_exactly_the_texts_of_code_and_templates(language: str) -> None:
    assert _texts(catalogues.read(language)) == _texts(catalogues.extract())


@pytest.mark.parametrize("language", catalogues.LANGUAGES)
def test_catalogue_is_fully_translated(language: str) -> None:
    assert catalogues.untranslated(catalogues.read(language)) == []


@pytest.mark.parametrize("language", catalogues.LANGUAGES)
def test_compiled_catalogue_matches_its_source(language: str) -> None:
    fresh = BytesIO()
    write_mo(fresh, catalogues.read(language))
    compiled = catalogues.po_path(language).with_suffix(".mo").read_bytes()
    assert compiled == fresh.getvalue()


def test_translation_has_the_same_placeholders_as_the_text() -> None:
    for message in catalogues.read("zh"):
        asked = set(_PLACE.findall(str(message.id)))
        for string in message.string if isinstance(message.string, tuple) else (message.string,):
            assert not message.id or set(_PLACE.findall(str(string))) == asked, message.id


def test_chinese_translations_contain_chinese() -> None:
    for message in catalogues.read("zh"):
        strings = message.string if isinstance(message.string, tuple) else (message.string,)
        assert not message.id or all(re.search(r"[\u4e00-\u9fff]", string) for string in strings), message.id


def test_every_stored_value_has_a_label() -> None:
    for name in (*Phase, *OutboxState, *ROLES, "live", "late", "lost", "unknown", "user", "admin", "system"):
        assert name in WORDS, name
    assert set(HistoryType) == set(EVENT_WORDS)


def test_every_history_type_has_an_icon() -> None:
    marks = set(re.findall(r'<symbol id="(\w+)"', (catalogues.CHECKOUT / "static/icons.svg").read_text("utf-8")))
    assert set(HistoryType) <= marks


def test_every_error_code_of_a_job_is_explained() -> None:
    ends = [code for code in CODES.values() if code.http == 500 or code.retried is not Retried.NEVER]
    assert ends
    for code in ends:
        assert code.code in FAILURES, code.code
    assert explain_failure("PROVIDER_OF_A_PLUGIN") is not explain_failure("INTERNAL_ERROR")
    assert explain_failure(None) == FAILURES["INTERNAL_ERROR"]
    assert all(each.what and each.advice for each in (*FAILURES.values(), *WAITS.values()))
