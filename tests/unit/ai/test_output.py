"""The strict parser: what it accepts unchanged, and what it refuses."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aijobs.ai.output import MAX_CHARACTERS, NotJson, parse_json_answer, read_answer
from aijobs.canonical import MAX_DEPTH
from aijobs.errors import JobError

FENCED_CODE = "Run:\n```python\nprint('x')\n```\nand see"

ACCEPTED = {
    "plain": ('{"a": 1}', {"a": 1}),
    "fence marks inside a string": (json.dumps({"a": FENCED_CODE}), {"a": FENCED_CODE}),
    "fenced with fence marks inside": (f"```json\n{json.dumps({'a': FENCED_CODE})}\n```", {"a": FENCED_CODE}),
    "upper-case label": ('```JSON\n{"a": 1}\n```', {"a": 1}),
    "no label": ('```\n{"a": 1}\n```', {"a": 1}),
    "prose before the one fence": ('Here you are:\n\n```json\n{"a": 1}\n```', {"a": 1}),
    "byte order mark": ('\ufeff{"a": 1}', {"a": 1}),
    "CRLF": ('```json\r\n{\r\n"a": 1\r\n}\r\n```\r\n', {"a": 1}),
    "think block": ('<think>{"a": 2} or so</think>\n{"a": 1}', {"a": 1}),
    "think block, then a fence": ('<think>hm</think>\n```json\n{"a": 1}\n```', {"a": 1}),
    "minus zero": ('{"a": -0}', {"a": 0}),
    "largest safe integer": ('{"a": 9007199254740991}', {"a": 2**53 - 1}),
    "emoji by surrogate pair": (r'{"a": "\ud83d\ude00"}', {"a": "😀"}),
    "beyond the BMP, raw": ('{"a": "\U0010ffff\u202e"}', {"a": "\U0010ffff\u202e"}),
    "decomposed accent": ('{"e\u0301": ["e\u0301"]}', {"é": ["é"]}),
}

REFUSED = {
    "prose": "I can't help with that.",
    "trailing words": '{"a": 1} I hope this helps',
    "leading words": 'Sure: {"a": 1}',
    "two objects": '{"a": 1}{"a": 2}',
    "two fences": '```json\n{"a": 1}\n```\nor\n```json\n{"a": 2}\n```',
    "another fence first": '```python\nx = 1\n```\n```json\n{"a": 1}\n```',
    "a fence of something else": '```yaml\n{"a": 1}\n```',
    "prose after the fence": '```json\n{"a": 1}\n```\nDone.',
    "missing closing fence": '```json\n{"a": 1}',
    "cut off": '{"a": [1, 2',
    "cut off in a think block": '<think>so {"a": 1}',
    "array": "[1]",
    "string": '"a"',
    "null": "null",
    "NaN": '{"score": NaN}',
    "Infinity": '{"score": Infinity}',
    "minus Infinity": '{"score": -Infinity}',
    "overflow": '{"score": 1e999}',
    "huge integer": '{"score": 1' + "0" * 400 + "}",
    "integer too long to convert": '{"score": ' + "9" * 10_000 + "}",
    "integer beyond 2^53": '{"score": 9007199254740992}',
    "too deep": '{"a":' * 2000 + "1" + "}" * 2000,
    "too deep in arrays": '{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}",
    "duplicate key": '{"a": 1, "a": 2}',
    "duplicate key, nested": '{"b": [{"a": 1, "a": 1}]}',
    "keys that are one after NFC": '{"\u00e9": 1, "e\u0301": 2}',
    "NUL in a value": r'{"a": "x\u0000"}',
    "NUL in a key": r'{"\u0000": 1}',
    "NUL, raw": '{"a": "\x00"}',
    "lone surrogate": r'{"a": "\ud800"}',
    "lone surrogate in a nested list": r'{"a": [["\udfff"]]}',
    "lone surrogate, raw": '{"a": "\ud800"}',
    "raw line break in a string": '{"a": "x\ny"}',
    "single quotes": "{'a': 1}",
    "comment": '{"a": 1} // one',
    "trailing comma": '{"a": 1,}',
}


@pytest.mark.parametrize(("text", "expected"), ACCEPTED.values(), ids=ACCEPTED)
def test_unambiguous_object_is_accepted_unchanged(text: str, expected: object) -> None:
    assert parse_json_answer(text) == expected


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_anything_but_one_strict_object_is_refused(text: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_json_answer(text)

    assert caught.value.code == "VALIDATION_OUTPUT_NOT_JSON"
    assert len(caught.value.faults) == 1


@pytest.mark.parametrize("text", ["", "   \n", "\ufeff", "```json\n \n```", "<think>hm</think>\n"])
def test_blank_answer_is_an_empty_output_and_not_bad_json(text: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_json_answer(text)

    assert caught.value.code == "PROVIDER_EMPTY_OUTPUT"


def test_huge_answer_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(JobError) as caught:
        parse_json_answer('{"a": "' + "x" * MAX_CHARACTERS + '"}')

    assert caught.value.code == "VALIDATION_OUTPUT_TOO_LARGE"


def test_truncated_answer_is_refused_even_if_it_parses() -> None:
    with pytest.raises(JobError) as caught:
        read_answer('{"cards": []}', "length")

    assert caught.value.code == "VALIDATION_TRUNCATED"
    assert "cut off" in caught.value.faults[0]


def test_complete_answer_is_read() -> None:
    assert read_answer('{"cards": []}', "stop") == {"cards": []}


@pytest.mark.parametrize("ascii_only", [True, False])
def test_bidi_overrides_are_removed_from_every_text_of_an_answer(ascii_only: bool) -> None:
    overrides = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    answer = {"cards": [{"front": f"a{overrides}b", "tags": [overrides, "e\u202e\u0301"]}], "note": "\u200eשלום\u200f"}

    read = read_answer(json.dumps(answer, ensure_ascii=ascii_only), "stop")

    assert read == {"cards": [{"front": "ab", "tags": ["", "é"]}], "note": "\u200eשלום\u200f"}


def test_error_does_not_quote_the_answer() -> None:
    with pytest.raises(NotJson) as caught:
        parse_json_answer('{"a": canary-4711}')

    assert "canary" not in f"{caught.value.internal}{caught.value.faults}"


def read_or_code(text: str) -> dict[str, object] | str:
    try:
        return parse_json_answer(text)
    except JobError as error:
        return error.code


storable = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))
with_backticks = st.lists(st.sampled_from(["`", "```", "```json\n", "\n```", '"', "\\", "{", "}", "a", "\r\n"])).map(
    "".join
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | storable,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(storable.map(lambda k: unicodedata.normalize("NFC", k)), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(text=with_backticks | storable, fenced=st.booleans(), ascii_only=st.booleans())
def test_any_string_is_read_unchanged_with_or_without_a_fence(text: str, fenced: bool, ascii_only: bool) -> None:
    answer = json.dumps({"text": text}, ensure_ascii=ascii_only, indent=2)

    parsed = parse_json_answer(f"```json\n{answer}\n```" if fenced else answer)

    assert parsed == {"text": unicodedata.normalize("NFC", text)}


@given(value=values)
def test_parsing_is_idempotent(value: object) -> None:
    once = parse_json_answer(json.dumps({"value": value}))

    assert parse_json_answer(json.dumps(once)) == once


@given(text=st.text() | with_backticks)
def test_any_text_is_an_object_or_a_named_error(text: str) -> None:
    outcome = read_or_code(text)

    if isinstance(outcome, str):
        assert outcome in ("VALIDATION_OUTPUT_NOT_JSON", "PROVIDER_EMPTY_OUTPUT")
    else:
        assert outcome == json.loads(json.dumps(outcome))
