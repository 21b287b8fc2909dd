"""Money for people: every digit, and no cost rounded to zero."""

from __future__ import annotations

import pytest

from aijobs.web.money import format_money


@pytest.mark.parametrize(
    ("micros", "currency", "shown"),
    [
        (1234, "USD", "$0.001234"),
        (1, "USD", "$0.000001"),
        (0, "USD", "$0.00"),
        (500_000, "USD", "$0.50"),
        (1_250_000_000, "USD", "$1,250.00"),
        (-1_500_000, "USD", "-$1.50"),
        (20_000_001, "CNY", "CN¥20.000001"),
        (1_100_000, "XTS", "1.10 XTS"),
        (1_100_000, None, "1.10"),
        (9_007_199_254_740_993_000_001, "EUR", "€9,007,199,254,740,993.000001"),
    ],
)
def test_money_keeps_every_digit_and_rounds_nothing_to_zero(micros: int, currency: str | None, shown: str) -> None:
    assert format_money(micros, currency) == shown
