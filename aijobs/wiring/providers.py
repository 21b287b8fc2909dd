"""Build providers, prices and safety rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple
from functools import cache, partial
from pathlib import Path

from aijobs.ai.billing.cost import BUILT_IN, CostCalculator
from aijobs.ai.catalogue import Catalogue
from aijobs.ai.provider import Moderator
from aijobs.ai.providers.openai_compatible import LoopThread, OpenAiCompatibleProvider
from aijobs.engine.guard import Guard
from aijobs.errors import SettingsError
from aijobs.forks import new_lock
from aijobs.screening.safety import ContentSafety
from aijobs.settings import Settings


def _check_cost_quotas(settings: Settings, catalogue: Catalogue, costs: CostCalculator) -> None:
    """Refuse a cost quota that would never be reached, because a model without a price may be called."""
    if not settings.quota_day_cost_micros and not settings.quota_month_cost_micros:
        return
    routed = {route for routes in catalogue.routes.values() for route in routes}
    unpriced = sorted(f"{route.provider}/{route.model}" for route in routed if not costs.knows(*astuple(route)))
    if unpriced:
        raise SettingsError(f"a quota of cost can't hold: no price is known for {', '.join(unpriced)} (AIJOBS_PRICES)")


_load_safety = cache(ContentSafety.load)


_SAFETY_LOCK = new_lock()


def build_guard(settings: Settings) -> Guard:
    """Build the checks before and after an attempt's work. `SettingsError` for invalid safety rules."""
    safety = partial(_safety, Path(settings.safety_rules) if settings.safety_rules else None)
    if settings.safety_rules:
        safety()  # An operator's rules may be wrong, so read them at the start. The built-in ones are read later.
    return Guard(safety)


def _safety(rules: Path | None) -> ContentSafety:
    """Read the rules once per process. With `cache` alone, several threads could read them at the same time."""
    with _SAFETY_LOCK:
        return _load_safety(rules)


def find_moderator(catalogue: Catalogue, servers: Iterable[OpenAiCompatibleProvider]) -> Moderator | None:
    """Return the first usable server of the catalogue that judges content; None if there is none."""
    names = [name for name, config in catalogue.providers.items() if config.moderation_model and config.ready]
    return next((server for server in servers if server.name in names[:1]), None)


def build_servers(catalogue: Catalogue) -> list[OpenAiCompatibleProvider]:
    """Build a provider for each server of the catalogue, all on one loop."""
    loop = LoopThread()
    return [OpenAiCompatibleProvider(config, loop) for config in catalogue.providers.values()]


def build_costs(settings: Settings, catalogue: Catalogue) -> CostCalculator:
    """Build the cost calculator, from the operator's price list or the built-in one."""
    path = Path(settings.prices) if settings.prices else BUILT_IN
    return CostCalculator.load(path, catalogue.price_names())
