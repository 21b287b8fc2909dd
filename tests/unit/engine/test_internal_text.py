"""The internal text of an error: short, storable, and without secrets."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError
from sqlalchemy.exc import OperationalError

from aijobs.engine.failure import MAX_BYTES, as_job_error, internal_text
from aijobs.errors import JobError


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Endless(Exception):
    def __str__(self) -> str:
        return str(self)


def test_internal_text_contains_the_stack() -> None:
    text = internal_text(raised(ValueError("a detail")))
    assert "ValueError: a detail" in text
    assert 'File "' in text
    assert ", line " in text


@pytest.mark.parametrize(
    "words",
    [
        "x" * 20_000_000,
        "\N{GRINNING FACE}" * 30_000,
        "a\x00b" * 10_000,
        "\ud800" * 20_000,
        "é\N{GRINNING FACE}" * 9_000,
    ],
    ids=["20 MB", "four-byte", "nul", "surrogates", "cut within a character"],
)
def test_internal_text_of_any_error_can_be_stored(words: str) -> None:
    text = internal_text(raised(ValueError(words)))
    stored = text.encode()
    assert 0 < len(stored) <= MAX_BYTES
    assert stored.decode() == text
    assert "\x00" not in text


@pytest.mark.parametrize("error", [Unprintable(), Endless()], ids=["raises", "recurses"])
def test_unprintable_error_is_named_by_its_class(error: Exception) -> None:
    assert type(error).__name__ in internal_text(raised(error))


@pytest.mark.parametrize(
    ("words", "secret"),
    [
        ("key sk-proj-abcdEFGH12345678 refused", "abcdEFGH12345678"),
        ("Authorization: Bearer abc.def-ghi_jkl", "abc.def-ghi_jkl"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl", "c2lnbmF0dXJl"),
        ("redis://worker:hunter2secret@10.0.0.1:6379/0", "hunter2secret"),
        ("postgresql+psycopg://aijobs:hunter2secret@db/aijobs", "hunter2secret"),
        ("{'api_key': 'abcdefgh12345678'}", "abcdefgh12345678"),
        ('{"password": "correct horse"}', "correct"),
        ("client_secret=zzzzyyyyxxxx", "zzzzyyyyxxxx"),
        ("DEEPSEEK_API_KEY=zzzzyyyyxxxx", "zzzzyyyyxxxx"),
        ("x-api-key: zzzzyyyyxxxx", "zzzzyyyyxxxx"),
    ],
)
def test_secrets_are_masked(words: str, secret: str) -> None:
    text = internal_text(raised(ValueError(words)))
    assert secret not in text
    assert "ValueError" in text


def test_secret_in_the_cause_is_masked() -> None:
    try:
        try:
            raise ValueError("sk-abcdefghijklmnop")
        except ValueError as cause:
            raise JobError("INTERNAL_PROJECTION", "the projector raised") from cause
    except JobError as error:
        text = internal_text(error)
    assert "the projector raised" in text
    assert "abcdefghijklmnop" not in text


@pytest.mark.parametrize("unit", ["a", "-eyJ", "sk-", "password", "bearer ", "a:", "://", "x://y:"])
def test_search_for_secrets_is_fast_for_any_text(unit: str) -> None:
    """The search holds the interpreter lock, so a slow search would delay every renewal of the process."""
    error = raised(ValueError(unit * (20_000_000 // len(unit))))
    # A search in quadratic time would exceed the test's timeout.
    assert len(internal_text(error)) < 20_000


def test_database_error_has_its_own_code() -> None:
    database = OperationalError("SELECT 1", {}, Exception("gone"))
    assert as_job_error(database).code == "INTERNAL_DATABASE"
    assert as_job_error(RuntimeError("x")).code == "INTERNAL_ERROR"
    coded = JobError("PROVIDER_TIMEOUT")
    assert as_job_error(coded) is coded


CONTENT = "what-a-learner-wrote"


class Note(BaseModel):
    model_config = ConfigDict(extra="forbid")

    title: int


def test_schema_error_names_field_and_fault_without_the_value() -> None:
    with pytest.raises(ValidationError) as refused:
        Note.model_validate({"title": CONTENT})
    text = internal_text(refused.value)
    assert "title: Input should be a valid integer" in text
    assert CONTENT not in text


def test_chain_of_errors_begins_with_the_first_cause_and_names_each_once() -> None:
    try:
        try:
            try:
                raise KeyError("first")
            except KeyError:
                raise LookupError("second") from None
        except LookupError as second:
            second.__context__ = second  # A cycle, as careless code creates it.
            raise ExceptionGroup("third", [ValueError("of a group")]) from second
    except ExceptionGroup as error:
        text = internal_text(error)
    places = [text.find(line) for line in ("LookupError: second", "ValueError: of a group", "ExceptionGroup: third")]
    assert -1 not in places
    assert places == sorted(places)
    assert "KeyError: 'first'" not in text, "`from None` hides it"


def test_very_long_chain_of_errors_ends_with_the_last() -> None:
    error: BaseException | None = None
    for number in range(5000):
        following = ValueError(number)
        following.__context__ = error
        error = following
    assert error is not None
    assert internal_text(error).endswith("ValueError: 4999\n")
