"""The files in `deploy/` can be used as they are: units, settings, commands, the Redis user."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
import redis

from aijobs.queues.connection import ACL_RULES
from aijobs.queues.consumer import ABANDON_LIMIT_S, EXIT_ABANDONED
from aijobs.settings import Settings
from tests.contracts import documents
from tests.contracts.sources import ROOT
from tests.support.servers import ValkeyServer

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
CONSUMERS = [unit for unit in UNITS if unit.stem != "aijobs-web"]
BIN = Path(sys.executable).parent
PLACEHOLDERS = {
    "AIJOBS_SECRET_KEY": "s" * 32,
    "AIJOBS_MESSAGE_KEYS": f"k1:{'m' * 32}",
    "AIJOBS_CREDENTIAL_KEYS": f"k1:{'c' * 32}",
    "AIJOBS_JWT_SECRET": "j" * 32,
}


def read(unit: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.read_text(encoding="utf-8"))
    return parser


def example() -> dict[str, str]:
    """Return the settings of the example that are not commented out."""
    lines = documents.read("deploy/aijobs.env.example").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_deploy_files_name_only_existing_settings() -> None:
    known = {f"AIJOBS_{field.name.upper()}" for field in fields(Settings)}
    for path in [path for path in (ROOT / "deploy").rglob("*") if path.is_file()]:
        assert set(re.findall(r"AIJOBS_[A-Z_]*[A-Z]", path.read_text(encoding="utf-8"))) <= known, path.name


def test_example_environment_lacks_only_secrets(tmp_path: Path) -> None:
    settings = Settings.load(example() | PLACEHOLDERS | {"AIJOBS_INSTANCE_PATH": str(tmp_path)})
    assert settings.production
    assert {name for name, value in example().items() if not value or value.endswith(":")} == set(PLACEHOLDERS)


def test_target_has_exactly_the_units() -> None:
    target = read(ROOT / "deploy" / "systemd" / "aijobs.target")
    assert set(target["Unit"]["Wants"].split()) == {unit.name for unit in UNITS}
    assert all(read(unit)["Install"]["WantedBy"] == "aijobs.target" for unit in UNITS)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_program_of_a_unit_exists(unit: Path) -> None:
    program, *arguments = read(unit)["Service"]["ExecStart"].split()
    assert (BIN / Path(program).name).is_file()
    target = next(argument for argument in arguments if argument.startswith("aijobs."))
    if unit.stem == "aijobs-web":
        # An import would read the settings.
        assert target == "aijobs.web.wsgi:app"
        assert (ROOT / "aijobs" / "web" / "wsgi.py").is_file()
    else:
        module, _, name = target.rpartition(".")
        assert hasattr(import_module(module), name)


def test_every_gunicorn_command_uses_our_configuration() -> None:
    for place in ["README.md", "docs/production.md", "deploy/systemd/aijobs-web.service"]:
        commands = re.findall(r"gunicorn\b.*aijobs\.web\.wsgi:app", documents.read(place))
        assert commands, place
        assert all(re.search(r"--config\W+python:aijobs\.web\.server", command) for command in commands), place


@pytest.mark.parametrize("unit", CONSUMERS, ids=lambda unit: unit.stem)
def test_consumer_unit_has_time_to_stop_and_restarts(unit: Path) -> None:
    service = read(unit)["Service"]
    assert service["KillSignal"] == "SIGTERM"
    assert float(service["TimeoutStopSec"]) > Settings().shutdown_grace_s + ABANDON_LIMIT_S
    assert service["Restart"] == "on-failure"
    assert service["RestartForceExitStatus"] == str(EXIT_ABANDONED)
    # Otherwise a starting consumer could not find out that its predecessor is dead.
    assert "PrivatePIDs" not in service


@pytest.mark.parametrize("queue", ["interactive", "background"])
def test_consumer_unit_survives_a_job_that_takes_all_memory(queue: str) -> None:
    """By default, systemd stops a unit if the kernel killed one of its processes."""
    unit = read(ROOT / "deploy" / "systemd" / f"aijobs-{queue}.service")
    assert unit["Service"]["OOMPolicy"] == "continue"


def test_units_have_the_same_sandbox_options() -> None:
    prefixes = r"NoNew|Protect|Private|Restrict[A-Z]|SystemCall|Capability|Ambient|Lock|Remove"
    strictness = [{item for item in read(unit)["Service"].items() if re.match(prefixes, item[0])} for unit in UNITS]
    assert all(one == strictness[0] for one in strictness)
    assert len(strictness[0]) > 15


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze on this machine")
    for path in (ROOT / "deploy" / "systemd").iterdir():
        text = path.read_text(encoding="utf-8").replace("/opt/aijobs/.venv/bin", str(BIN))
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    found = subprocess.run(
        [analyze, "verify", "--man=no", *sorted(tmp_path.iterdir())], capture_output=True, text=True, check=False
    )
    # Messages about other units concern the machine, not our files.
    said = [line for line in (found.stdout + found.stderr).splitlines() if "aijobs" in line]
    assert not said


def test_redis_user_of_the_example_can_sign_in(start_valkey: Callable[..., ValkeyServer], tmp_path: Path) -> None:
    text = documents.read("deploy/redis-users.acl.example")
    assert text == f"user aijobs on >PASSWORD {ACL_RULES}\n"
    path = tmp_path / "users.acl"
    path.write_text(text, encoding="utf-8")
    broker = start_valkey(f"aclfile {path}")
    with redis.Redis.from_url(broker.url_for("aijobs", "PASSWORD")) as client:
        assert client.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.flushall()
