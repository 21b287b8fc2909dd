"""Format money from integer micro-units: all digits, no floats."""

from __future__ import annotations

MICROS = 1_000_000
_SIGNS = {"USD": "$", "EUR": "€", "GBP": "£", "CNY": "CN¥"}


def format_money(micros: int, currency: str | None) -> str:
    """Return `$0.001234`, `$1,250.00`, `0.50 XTS`: two to six decimals, and the currency's sign or code."""
    whole, rest = divmod(abs(micros), MICROS)
    decimals = f"{rest:06}".rstrip("0").ljust(2, "0")
    amount, minus = f"{whole:,}.{decimals}", "-" if micros < 0 else ""
    sign = _SIGNS.get(currency or "")
    return f"{minus}{sign}{amount}" if sign else f"{minus}{amount} {currency or ''}".strip()
