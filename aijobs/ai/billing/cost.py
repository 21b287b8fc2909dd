"""Compute the cost of a provider call from a versioned price list, in whole micro-units."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from aijobs.errors import SettingsError

BUILT_IN = Path(__file__).with_name("prices.toml")
_MILLION = 1_000_000
_DATED = re.compile(r"(?P<name>.+?)-(?:\d{8}|\d{4}-\d{2}-\d{2})")


@dataclass(frozen=True, slots=True)
class Cost:
    """`micro_units` are millionths of `currency`; `price_version` names the list that was used."""

    micro_units: int
    currency: str
    price_version: str


@dataclass(frozen=True, slots=True)
class _Peak:
    multiplier: int
    zone: timezone
    weekdays: frozenset[int]
    hours: tuple[tuple[int, int], ...]

    def factor(self, at: datetime) -> int:
        local = at.astimezone(self.zone)
        busy = local.weekday() in self.weekdays and any(first <= local.hour < last for first, last in self.hours)
        return self.multiplier if busy else 1


@dataclass(frozen=True, slots=True)
class _Price:
    input: int
    cached_input: int
    output: int
    peak: _Peak | None


class CostCalculator:
    """Prices by provider and model. Make one with `load`."""

    def __init__(self, document: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
        """`document` has the format of `prices.toml`; `SettingsError` if it doesn't.

        `names`: the price list's name of a provider, if it differs.
        """
        self._names = dict(names or {})
        try:
            self.version = _text(document["version"])
            self.currency = _text(document["currency"])
            peaks = {name: _read_peak(peak) for name, peak in document.get("peak", {}).items()}
            self._prices: dict[tuple[str, str], _Price] = {}
            for model in document["model"]:
                self._add(model, peaks)
        except (KeyError, TypeError, ValueError) as error:
            raise SettingsError(f"the price list is not valid: {type(error).__name__}: {error}") from error

    @classmethod
    def load(cls, path: Path = BUILT_IN, names: Mapping[str, str] | None = None) -> CostCalculator:
        """Return the calculator of a price list file. `SettingsError` if it can't be read."""
        try:
            document = tomllib.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise SettingsError(f"the price list {path.name} can't be read: {error}") from error
        return cls(document, names)

    def cost(
        self,
        provider: str,
        model: str,
        *,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int,
        at: datetime,
    ) -> Cost | None:
        """Return the cost of a call at `at` (aware); None if the model has no price.

        `cached_tokens` are part of `prompt_tokens` and are billed once, at their own price. Half a micro-unit rounds
        up. `ValueError` for negative counts, and for more cached tokens than prompt tokens.
        """
        if min(prompt_tokens, completion_tokens, cached_tokens) < 0 or cached_tokens > prompt_tokens:
            raise ValueError("token counts must be at least 0, and cached tokens at most the prompt's")
        price = self._price(provider, model)
        if price is None:
            return None
        per_million = (
            (prompt_tokens - cached_tokens) * price.input
            + cached_tokens * price.cached_input
            + completion_tokens * price.output
        )
        if price.peak is not None:
            per_million *= price.peak.factor(at)
        return Cost((per_million + _MILLION // 2) // _MILLION, self.currency, self.version)

    def knows(self, provider: str, model: str) -> bool:
        """Return whether the model has a price."""
        return self._price(provider, model) is not None

    def _price(self, provider: str, model: str) -> _Price | None:
        provider = self._names.get(provider, provider)
        found = self._prices.get((provider, model))
        if found is None and (dated := _DATED.fullmatch(model)):
            found = self._prices.get((provider, dated["name"]))
        return found

    def _add(self, model: Mapping[str, Any], peaks: Mapping[str, _Peak]) -> None:
        price = _Price(
            input=_amount(model["input"]),
            cached_input=_amount(model["cached_input"]),
            output=_amount(model["output"]),
            peak=peaks[model["peak"]] if "peak" in model else None,
        )
        for name in (model["name"], *model.get("aliases", ())):
            key = (_text(model["provider"]), _text(name))
            if key in self._prices:
                raise ValueError(f"{name} has two prices")
            self._prices[key] = price


def _read_peak(peak: Mapping[str, Any]) -> _Peak:
    return _Peak(
        multiplier=_amount(peak["multiplier"]),
        zone=timezone(timedelta(hours=peak["utc_offset_hours"])),
        weekdays=frozenset(peak["weekdays"]),
        hours=tuple((first, last) for first, last in peak["hours"]),
    )


def _amount(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a whole number of micro-units")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a name")
    return value
