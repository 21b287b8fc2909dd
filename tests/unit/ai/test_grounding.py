"""Quotes are found regardless of width, case, quotation marks and white space."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aijobs.learning.grounding import FoldedText, fold, script_of
from tests.support.counting import count_calls

FOUND = [
    ("The Krebs cycle takes place\r\n   in the matrix.", "takes place in the matrix"),
    ("“Osmosis” – a definition", '"osmosis" - A DEFINITION'),
    ("Ｐｈｏｔｏ Ｓｙｎｔｈｅｓｉｓ", "photo synthesis"),
    ("光合作用在\n叶绿体中进行。", "光合作用在叶绿体中进行"),
    ("水的沸点是１００℃。", "沸点是100℃"),
    ("cafe\u0301 au lait", "caf\u00e9 au lait"),
    ("caf\u00e9 au lait", "cafe\u0301 au lait"),
    ("Straße nach Süden", "STRASSE NACH"),
    ("zero\u200bwidth", "zerowidth"),
    ("don’t stop", "don't stop"),
    ("the ﬁrst law", "the first law"),
    ("read \u202ethis\u202c and \u2067that\u2069", "read this and that"),
]


@pytest.mark.parametrize(("text", "quote"), FOUND)
def test_quote_is_found_regardless_of_typography(text: str, quote: str) -> None:
    assert FoldedText(text).locate(quote) is not None


@pytest.mark.parametrize("quote", ["", "a", "the", "植", "   ", "plants eat sugar", "Plants make sugar!!"])
def test_absent_or_trivial_quote_is_not_found(quote: str) -> None:
    assert FoldedText("Plants make sugar. The 植物.").locate(quote) is None


def test_place_of_a_quote_refers_to_the_verbatim_text() -> None:
    text = "First.  “Osmosis”\n is diffusion of WATER. cafe\u0301"
    folded = FoldedText(text)

    place = folded.locate('"osmosis" is diffusion of water')
    accent = folded.locate("caf\u00e9")

    assert place is not None
    assert folded.slice(place) == "“Osmosis”\n is diffusion of WATER"
    assert accent is not None
    assert folded.slice(accent) == "cafe\u0301"


def test_combining_marks_after_a_quote_do_not_slow_down_searches() -> None:
    few, many = (FoldedText(f"Water{chr(0x301) * marks}") for marks in (10, 4_000))
    few.locate("water")

    assert count_calls(lambda: many.locate("water")) == count_calls(lambda: few.locate("water"))


@given(before=st.text(), quote=st.text(min_size=4), after=st.text())
def test_verbatim_quote_is_found_unless_it_folds_to_nothing(before: str, quote: str, after: str) -> None:
    folded = FoldedText(before + quote + after)

    place = folded.locate(quote)

    if place is not None:
        assert fold(quote) in fold(folded.slice(place))
    else:
        assert FoldedText(quote).locate(quote) is None


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Plants make sugar.", "en"),
        ("植物制造糖类。", "zh"),
        ("ATP 是细胞的能量货币", "zh"),
        ("Pinyin (拼音) is a way to write Chinese words.", "en"),
        ("C6H12O6", None),
        ("1789", None),
    ],
)
def test_script_is_detected_by_words_and_not_by_characters(text: str, script: str | None) -> None:
    assert script_of(text) == script
