"""Limits of providers and the time of job types: defaults adapt, contradictions stop the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from aijobs.errors import SettingsError
from aijobs.settings import Settings
from aijobs.wiring.services import Services, build_services

ACME = '[provider.acme]\nbase_url = "https://acme.example"\nmodels = ["m1"]\nkey = "none"\n'
ROUTES = '[routes]\ndefault = ["acme/m1"]\n'


def start(folder: Path, providers: str, **given: str) -> Services:
    (folder / "providers.toml").write_text(providers)
    services = build_services(
        Settings.load(
            {
                "AIJOBS_INSTANCE_PATH": str(folder),
                "AIJOBS_REDIS_URL": "redis://127.0.0.1:1/0",
                "AIJOBS_PROVIDERS": str(folder / "providers.toml"),
                **given,
            }
        )
    )
    services.database.dispose()
    return services


@pytest.mark.parametrize("entry", ["first_data_s", "idle_s"])
def test_configured_limit_beyond_the_timeout_of_a_job_type_stops_the_start(tmp_path: Path, entry: str) -> None:
    with pytest.raises(SettingsError) as refused:
        start(tmp_path, f"{ACME}{entry} = 300\n{ROUTES}")
    line = str(refused.value)
    assert f"acme: {entry} is 300, but an attempt of flashcard_generation has 120 s" in line
    assert "AIJOBS_JOB_TIMEOUTS=flashcard_generation=300" in line
    assert "\n" not in line


def test_configured_limit_is_accepted_with_a_longer_job_timeout(tmp_path: Path) -> None:
    services = start(tmp_path, f"{ACME}first_data_s = 300\n{ROUTES}", AIJOBS_JOB_TIMEOUTS="flashcard_generation=300")
    assert services.registry.get("flashcard_generation").execution.timeout_ms == 300_000


def test_default_limit_does_not_stop_the_start_for_a_short_job_timeout(tmp_path: Path) -> None:
    services = start(tmp_path, ACME + ROUTES, AIJOBS_JOB_TIMEOUTS="flashcard_generation=10")
    assert services.catalogue.providers["acme"].first_data_s == 120


@pytest.mark.parametrize("routes", ["", '[routes]\nother = ["acme/m1"]\n'])
def test_limit_of_an_unused_provider_does_not_stop_the_start(tmp_path: Path, routes: str) -> None:
    start(tmp_path, f"{ACME}first_data_s = 600\n{routes}")


def test_limit_of_the_route_for_users_keys_is_checked(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="acme: first_data_s is 121"):
        start(tmp_path, f'{ACME}first_data_s = 121\n[user_routes]\nuser_deepseek_key = ["acme/m1"]\n')


def test_timeout_for_an_unknown_job_type_stops_the_start_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="AIJOBS_JOB_TIMEOUTS: unknown job type 'poem'; there are flash") as refused:
        start(tmp_path, "", AIJOBS_JOB_TIMEOUTS="poem=3")
    assert "\n" not in str(refused.value)
