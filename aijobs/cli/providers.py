"""`aijobs providers …`: the AI providers that are configured."""

from __future__ import annotations

from typing import Any

import click

from aijobs.ai.catalogue import Catalogue, ProviderConfig
from aijobs.ai.trial import Trial, try_all
from aijobs.canonical import json_name
from aijobs.cli.opening import json_option, load_catalogue, load_settings, write_json
from aijobs.cli.terminal import Terminal
from aijobs.engine.token import CancellationToken
from aijobs.wiring.providers import build_costs, build_servers


@click.group()
def providers() -> None:
    """The AI providers."""


@providers.command()
@click.option("--all-models", is_flag=True, help="Also those that no route names.")
@json_option
def check(all_models: bool, as_json: bool) -> int:
    """Call each provider once for each model in use, with a few tokens, and print what works. Exit code 1 if one
    doesn't.

    It creates no job and writes nothing. Needs neither database nor broker.
    """
    settings = load_settings()
    catalogue = load_catalogue(settings)
    servers = build_servers(catalogue)
    terminal, trials = Terminal(), []
    try:
        costs = build_costs(settings, catalogue)
        for trial in try_all(catalogue, servers, costs, CancellationToken, all_models=all_models):
            trials.append(trial)
            if not as_json:
                _say(terminal, trial)
    finally:
        for server in servers:
            server.close()
    if as_json:
        write_json({"trials": [_as_json(trial) for trial in trials], "routes": _routes(catalogue)})
    else:
        _say_rest(terminal, catalogue)
    return 0 if all(trial.works for trial in trials) else 1


def _say(terminal: Terminal, trial: Trial) -> None:
    name = f"{trial.provider}/{trial.model}"
    if not trial.works:
        terminal.say(f"{terminal.style('fails', bold=True)}  {name}: {trial.code}: {trial.why}")
        return
    told = [f"{trial.latency_ms} ms", "tokens not counted" if trial.tokens is None else f"{trial.tokens} tokens"]
    told.append("no price known" if trial.cost is None else f"{trial.cost.micro_units / 1e6:.6f} {trial.cost.currency}")
    if trial.calls > 1:
        told.append("takes no schema" if trial.calls == 2 else "takes no constraint on its answer")
    if trial.answered_as:
        told.append(f"answered as {trial.answered_as}")
    terminal.say(f"works  {name}: {', '.join(told)}")


def _say_rest(terminal: Terminal, catalogue: Catalogue) -> None:
    for config in catalogue.providers.values():
        if not config.ready:
            terminal.say(f"no key {config.name}: {_variable(config)} is not set")
    for name, steps in _routes(catalogue).items():
        terminal.say(f"route  {name}: {', then '.join(steps)}")


def _routes(catalogue: Catalogue) -> dict[str, list[str]]:
    routes = {**catalogue.routes, **catalogue.user_routes}
    return {name: [f"{route.provider}/{route.model}" for route in steps] for name, steps in routes.items()}


def _variable(config: ProviderConfig) -> str:
    return f"AIJOBS_{config.name.upper()}_API_KEY"


def _as_json(trial: Trial) -> dict[str, Any]:
    shown = ("provider", "model", "works", "calls", "latency_ms", "code", "why", "tokens", "answered_as")
    cost = None if trial.cost is None else trial.cost.micro_units
    return {**{json_name(name): getattr(trial, name) for name in shown}, "costMicros": cost}
