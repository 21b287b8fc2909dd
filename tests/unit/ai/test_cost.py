"""Cost in whole micro-units: an unknown price is never 0, and no token is billed twice."""

from __future__ import annotations

import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aijobs.ai.billing.cost import BUILT_IN, Cost, CostCalculator
from aijobs.errors import SettingsError
from aijobs.settings import Settings
from aijobs.wiring.services import build_services

SUNDAY = datetime(2026, 11, 1, 12, tzinfo=UTC)
MONDAY_10_IN_BEIJING = datetime(2026, 11, 2, 2, tzinfo=UTC)
PRICES = CostCalculator.load()


def cost(model: str, prompt: int, completion: int, cached: int = 0, at: datetime = SUNDAY) -> Cost | None:
    return PRICES.cost(
        "local" if model.startswith("local") else "deepseek",
        model,
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=cached,
        at=at,
    )


@pytest.mark.parametrize(
    ("model", "prompt", "completion", "cached", "micro_units"),
    [
        ("local-extractive-v1", 10_000, 10_000, 0, 0),
        ("deepseek-flash", 1_000_000, 0, 0, 150_000),
        ("deepseek-flash", 0, 1_000_000, 0, 600_000),
        ("deepseek-flash", 1_000_000, 0, 1_000_000, 3_000),
        ("deepseek-flash", 1_000_000, 1_000_000, 400_000, 90_000 + 1_200 + 600_000),
        ("deepseek-v4-pro", 1_000_000, 1_000_000, 0, 660_000 + 1_980_000),
        ("deepseek-v4-pro", 1_000_000, 0, 1_000_000, 22_000),
    ],
)
def test_cost_follows_the_price_list_and_bills_cached_tokens_once(
    model: str, prompt: int, completion: int, cached: int, micro_units: int
) -> None:
    assert cost(model, prompt, completion, cached) == Cost(micro_units, "USD", PRICES.version)


def test_cost_of_a_model_without_a_price_is_unknown() -> None:
    assert cost("deepseek-chat", 100, 100) is None
    assert (
        PRICES.cost("vllm", "deepseek-flash", prompt_tokens=1, completion_tokens=1, cached_tokens=0, at=SUNDAY) is None
    )


@pytest.mark.parametrize("model", ["deepseek-flash-2026-09-01", "deepseek-flash-20260901"])
def test_dated_model_name_has_the_price_of_its_model(model: str) -> None:
    assert cost(model, 1_000_000, 0) == cost("deepseek-flash", 1_000_000, 0)


@pytest.mark.parametrize(
    ("at", "factor"),
    [
        (MONDAY_10_IN_BEIJING, 2),
        (datetime(2026, 11, 2, 0, 59, 59, tzinfo=UTC), 1),
        (datetime(2026, 11, 2, 1, tzinfo=UTC), 2),
        (datetime(2026, 11, 2, 4, tzinfo=UTC), 1),
        (datetime(2026, 11, 2, 6, tzinfo=UTC), 2),
        (datetime(2026, 11, 2, 10, tzinfo=UTC), 1),
        (datetime(2026, 11, 6, 9, 59, tzinfo=UTC), 2),
        (datetime(2026, 11, 7, 2, tzinfo=UTC), 1),
    ],
)
def test_peak_hours_are_working_hours_in_beijing(at: datetime, factor: int) -> None:
    found = cost("deepseek-flash", 1_000_000, 0, at=at)

    assert found is not None
    assert found.micro_units == 150_000 * factor


@given(prompt=st.integers(0, 10**12), completion=st.integers(0, 10**12), share=st.integers(0, 100))
def test_cost_is_exact_to_half_a_micro_unit(prompt: int, completion: int, share: int) -> None:
    cached = prompt * share // 100
    found = cost("deepseek-flash", prompt, completion, cached)

    exact = (prompt - cached) * 150_000 + cached * 3_000 + completion * 600_000
    assert found is not None
    assert isinstance(found.micro_units, int)
    assert abs(found.micro_units * 1_000_000 - exact) <= 500_000


@pytest.mark.parametrize(("prompt", "completion", "cached"), [(-1, 0, 0), (0, -1, 0), (1, 1, 2), (1, 1, -1)])
def test_impossible_token_counts_are_refused(prompt: int, completion: int, cached: int) -> None:
    with pytest.raises(ValueError, match="token counts"):
        cost("deepseek-flash", prompt, completion, cached)


def test_own_price_list_replaces_the_built_in_one(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(BUILT_IN.read_text("utf-8").replace("150_000", "151_000").replace("2026-11-01", "ours-1"), "utf-8")

    found = CostCalculator.load(path).cost(
        "deepseek", "deepseek-flash", prompt_tokens=1_000_000, completion_tokens=0, cached_tokens=0, at=SUNDAY
    )

    assert found == Cost(151_000, "USD", "ours-1")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("input = 150_000", "input = 0.15"),
        ("input = 150_000", "input = -1"),
        ("input = 150_000", ""),
        ('version = "2026-11-01"', ""),
        ('name = "deepseek-v4-pro"', 'name = "deepseek-flash"'),
        ('peak = "beijing-office-hours"', 'peak = "never"'),
        ("[[model]]", "[[model"),
    ],
)
def test_invalid_price_list_stops_the_start(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(BUILT_IN.read_text("utf-8").replace(old, new, 1), "utf-8")

    with pytest.raises(SettingsError, match="price list"):
        CostCalculator.load(path)


def test_missing_price_list_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"gone\.toml"):
        CostCalculator.load(tmp_path / "gone.toml")


def test_built_in_price_list_has_only_integers() -> None:
    document = tomllib.loads(BUILT_IN.read_text("utf-8"))

    amounts = [model[field] for model in document["model"] for field in ("input", "cached_input", "output")]
    assert {type(amount) for amount in amounts} == {int}


def test_cost_quota_for_models_without_a_price_stops_the_start(tmp_path: Path) -> None:
    """Calls without a price add no cost, so the limit would never take effect."""
    (tmp_path / "providers.toml").write_text(
        '[provider.acme]\nbase_url = "https://acme.example"\nmodels = ["m1"]\nkey = "none"\n'
        '[routes]\ndefault = ["acme/m1"]\n'
    )
    given = {"AIJOBS_INSTANCE_PATH": str(tmp_path), "AIJOBS_REDIS_URL": "redis://127.0.0.1:1/0"}
    with pytest.raises(SettingsError, match="no price is known for acme/m1"):
        build_services(
            Settings.load(
                {
                    **given,
                    "AIJOBS_PROVIDERS": str(tmp_path / "providers.toml"),
                    "AIJOBS_QUOTA_DAY_COST_MICROS": "1000000",
                }
            )
        )
    priced = build_services(Settings.load({**given, "AIJOBS_QUOTA_DAY_COST_MICROS": "1000000"}))
    assert priced.costs.knows("local", "local-extractive-v1")
    priced.database.dispose()
