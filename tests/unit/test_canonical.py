"""Canonical JSON: equal values have one spelling, and values without one are named."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aijobs.canonical import (
    MAX_DEPTH,
    MAX_INTEGER,
    canonical_bytes,
    canonical_hash,
    find_faults,
    identifier_fault,
    text_fault,
)

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12)
numbers = st.integers(-MAX_INTEGER, MAX_INTEGER) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal: 1 is 1.0, but true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool) or one is None or other is None:
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, dict | list) or isinstance(other, dict | list):
        return False
    return bool(one == other) and isinstance(one, str) == isinstance(other, str)


def shuffled(value: Any, draw: Any) -> Any:
    """Return the same value with its keys in another order."""
    if isinstance(value, dict):
        keys = draw(st.permutations(list(value)))
        return {key: shuffled(value[key], draw) for key in keys}
    return [shuffled(inner, draw) for inner in value] if isinstance(value, list) else value


@given(values, values)
def test_values_share_a_hash_only_if_they_are_equal(one: Any, other: Any) -> None:
    assert (canonical_hash(one) == canonical_hash(other)) == same(one, other)


@given(values, st.data())
def test_order_of_keys_does_not_change_the_canonical_json(value: Any, data: st.DataObject) -> None:
    assert canonical_bytes(shuffled(value, data.draw)) == canonical_bytes(value)


@given(values)
def test_canonical_json_parses_to_the_same_value(value: Any) -> None:
    # Large floats have no exponent, so the reader must parse integers as floats.
    assert same(json.loads(canonical_bytes(value), parse_int=float), value)
    assert list(find_faults(value)) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"q": [{"text": "A"}]}, {"q": [{"text": "B"}]}),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}),
        ({"a": 1}, {"a": "1"}),
        ({"a": 1}, {"a": True}),
        ({"a": None}, {}),
        ([1, 2], [2, 1]),
        ("é", "e\u0301"),
        (2**53 - 1, 2**53 - 2),
    ],
)
def test_values_that_differ_at_any_depth_have_different_hashes(one: Any, other: Any) -> None:
    assert canonical_hash(one) != canonical_hash(other)


def test_canonical_json_follows_rfc_8785() -> None:
    value = {"b": [1.0, -0.0, 1e21, 1e-7, 333333333.33333329], "a": '€$\x0f\nA\'B"\\\\"/', "\U0001f600": 1, "\ufb33": 2}
    assert canonical_bytes(value).decode() == (
        '{"a":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/","b":[1,0,1e+21,1e-7,333333333.3333333],"\U0001f600":1,"\ufb33":2}'
    )
    assert len(canonical_hash(value)) == 64


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2**53, -(2**53), "\ud800", {"\udfff": 1}])
def test_value_without_canonical_json_is_refused_and_named(value: Any) -> None:
    assert [path for path, _ in find_faults({"a": [value]})] == ["a[0]"]
    with pytest.raises(ValueError):
        canonical_bytes(value)


def test_every_fault_is_named_by_its_path() -> None:
    value = {"a": ["ok", "\x00"], "b": {"c": math.nan, "d": [{"e": 10**400}]}, "f\x00": "\x00", "g": True}
    assert [path for path, _ in find_faults(value)] == ["a[1]", "b.c", "b.d[0].e", ""]


def test_too_deep_value_is_named_without_recursion() -> None:
    value: Any = 1
    for level in range(100_000):
        value = [value] if level % 2 else {"a": value}
    (fault,) = find_faults(value)
    assert fault[0].count("[0]") + fault[0].count("a") == MAX_DEPTH
    deepest: Any = "leaf"
    for _ in range(MAX_DEPTH):
        deepest = [deepest]
    assert list(find_faults(deepest)) == []
    assert len(list(find_faults([deepest]))) == 1


@given(st.text(max_size=300))
def test_identifier_that_databases_compare_differently_is_refused(text: str) -> None:
    fault = identifier_fault(text)
    fine = (
        1 <= len(text) <= 255
        and text == text.strip()
        and not any(ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in text)
    )
    assert (fault is None) == fine


@pytest.mark.parametrize("text", ["", "\U0010ffff", "\u202e", "\t\r\n\x01", "\ufffe"])
def test_text_may_contain_anything_but_nul_and_lone_surrogates(text: str) -> None:
    assert text_fault(text) is None
    assert text_fault(text + "\x00")
    assert text_fault(text + "\ud83d")
