"""Settings from the environment, and the lines with which a start is refused."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

from aijobs.errors import SettingsError
from aijobs.settings import KeyRing, Settings
from tests.support.processes import Processes

SECRETS = {
    "AIJOBS_SECRET_KEY": "s" * 32,
    "AIJOBS_JWT_SECRET": "j" * 32,
    "AIJOBS_MESSAGE_KEYS": f"k1:{'m' * 32}",
    "AIJOBS_CREDENTIAL_KEYS": f"k1:{'c' * 32}",
}


def load(folder: Path, **given: str) -> Settings:
    """Return the settings of an environment with these variables (without the prefix) and an instance folder."""
    return Settings.load(
        {"AIJOBS_INSTANCE_PATH": str(folder), **{f"AIJOBS_{name}": value for name, value in given.items()}}
    )


def refused(folder: Path, **given: str) -> str:
    """Return the line with which this environment is refused."""
    with pytest.raises(SettingsError) as error:
        load(folder, **given)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- defaults ------------------------------------------------------------------------------------------------------


def test_empty_environment_uses_the_instance_folder(tmp_path: Path) -> None:
    settings = load(tmp_path / "instance")
    assert settings.database_url == f"sqlite:///{tmp_path}/instance/aijobs.db"
    assert (settings.production, settings.bind, settings.redis_url) == (False, "127.0.0.1", "")
    assert (settings.lease_s, settings.heartbeat_s, settings.lease_grace_s) == (60, 15, 30)
    assert set(settings.development_keys) == {"secret_key", "message_keys", "jwt_secret", "credential_keys"}


def test_instance_folder_does_not_depend_on_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Settings().instance_path
    monkeypatch.chdir(tmp_path)
    assert Settings().instance_path == before
    assert before.is_absolute()


def test_empty_value_means_the_default(tmp_path: Path) -> None:
    settings = load(tmp_path, LEASE_S="", ENV="", BIND="", DATABASE_URL="")
    assert (settings.lease_s, settings.env_was_set, settings.bind) == (60, False, "127.0.0.1")
    assert settings.database_url.startswith("sqlite:///")


def test_repr_of_the_settings_shows_no_secret(tmp_path: Path) -> None:
    settings = load(
        tmp_path, ENV="development", DATABASE_URL="postgresql://u:hunter2@db/x", REDIS_URL="redis://:hunter2@r/0"
    )
    shown = repr(settings)
    assert "hunter2" not in shown
    assert settings.secret_key not in shown
    assert settings.jwt_secret not in shown
    assert settings.message_keys.current[1].decode() not in shown


@pytest.mark.parametrize(
    ("mistyped", "meant"),
    [("LEASE", "AIJOBS_LEASE_S"), ("REDIS_URI", "AIJOBS_REDIS_URL"), ("JOB_DAY", "AIJOBS_JOB_DAYS")],
)
def test_mistyped_setting_is_refused_with_the_right_name(tmp_path: Path, mistyped: str, meant: str) -> None:
    line = refused(tmp_path, **{mistyped: "120"})
    assert f"AIJOBS_{mistyped} " in line
    assert meant in line


def test_job_timeouts_are_read_by_type(tmp_path: Path) -> None:
    assert load(tmp_path).job_timeouts == {}
    read = load(tmp_path, JOB_TIMEOUTS="flashcard_generation=300, synthetic = 1.5,").job_timeouts
    assert read == {"flashcard_generation": 300.0, "synthetic": 1.5}


@pytest.mark.parametrize(
    "text",
    ["300", "a=", "=3", "a=x", "a=0", "a=0.5", "a=601", "a=1e2", "a=nan", "a=١", "a=-5", "a=3;b=4"],
)
def test_invalid_job_timeout_is_refused(tmp_path: Path, text: str) -> None:
    assert "AIJOBS_JOB_TIMEOUTS has" in refused(tmp_path, JOB_TIMEOUTS=text)


def test_repeated_job_timeout_is_refused(tmp_path: Path) -> None:
    assert "names a twice" in refused(tmp_path, JOB_TIMEOUTS="a=3,a=4")


@pytest.mark.parametrize("name", ["WHATEVER", "RUN_BY_FLASK", "ENV_WAS_SET", "DEVELOPMENT_KEYS", "lease_s"])
def test_unknown_setting_is_refused_by_name_without_its_value(tmp_path: Path, name: str) -> None:
    line = refused(tmp_path, **{name: "hunter2"})
    assert f"AIJOBS_{name} " in line
    assert "hunter2" not in line


@pytest.mark.parametrize("text", ["1_0", "١٢", "nan", "inf", "1e3", "-1", "+1", "0x10", "1,5", "1.2.3", "."])
@pytest.mark.parametrize(("name", "kind"), [("LEASE_S", "a number"), ("PORT", "a whole number")])
def test_number_that_is_not_plain_digits_is_refused(tmp_path: Path, name: str, kind: str, text: str) -> None:
    assert refused(tmp_path, **{name: text}) == f"AIJOBS_{name} is {text!r}; it is {kind}, 0 or more"


def test_fraction_of_a_whole_number_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, PORT="8000.5") == "AIJOBS_PORT is '8000.5'; it is a whole number, 0 or more"


@pytest.mark.parametrize("text", ["1000000000", "9" * 5000])
def test_too_large_number_is_refused_in_a_short_line(tmp_path: Path, text: str) -> None:
    line = refused(tmp_path, DISPATCH_BATCH=text)
    assert line.endswith("it is below 1000000000")
    assert len(line) < 100


# --- leases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beat", "lease", "grace"), [("15", "60", "30"), ("30", "60", "0"), ("0.1", "0.2", "0.1")])
def test_lease_longer_than_two_heartbeats_is_accepted(tmp_path: Path, beat: str, lease: str, grace: str) -> None:
    settings = load(tmp_path, HEARTBEAT_S=beat, LEASE_S=lease, LEASE_GRACE_S=grace)
    assert settings.seconds("heartbeat").total_seconds() == float(beat)


@pytest.mark.parametrize(
    ("beat", "lease", "grace", "named"),
    [
        ("60", "60", "0", "AIJOBS_HEARTBEAT_S"),
        ("59", "60", "1", "AIJOBS_HEARTBEAT_S"),
        ("90", "60", "30", "AIJOBS_HEARTBEAT_S"),
        ("30.1", "60", "30", "AIJOBS_HEARTBEAT_S"),
        ("0", "60", "30", "AIJOBS_HEARTBEAT_S"),
        ("-15", "60", "30", "AIJOBS_HEARTBEAT_S"),
        ("often", "60", "30", "AIJOBS_HEARTBEAT_S"),
        ("15", "0", "30", "AIJOBS_LEASE_S"),
        ("15", "-60", "30", "AIJOBS_LEASE_S"),
        ("15", "nan", "30", "AIJOBS_LEASE_S"),
        ("15", "inf", "30", "AIJOBS_LEASE_S"),
        ("15", "60 s", "30", "AIJOBS_LEASE_S"),
        ("15", "60", "-1", "AIJOBS_LEASE_GRACE_S"),
        ("15", "60", "none", "AIJOBS_LEASE_GRACE_S"),
    ],
)
def test_lease_that_a_late_heartbeat_would_lose_is_refused(
    tmp_path: Path, beat: str, lease: str, grace: str, named: str
) -> None:
    assert named in refused(tmp_path, HEARTBEAT_S=beat, LEASE_S=lease, LEASE_GRACE_S=grace)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SESSION_IDLE_HOURS", "0"),
        ("SESSION_IDLE_HOURS", "0.01"),
        ("SESSION_IDLE_HOURS", "8761"),
        ("SESSION_IDLE_HOURS", "a day"),
        ("SESSION_MAX_DAYS", "0"),
        ("SESSION_MAX_DAYS", "366"),
        ("SESSION_MAX_DAYS", "nan"),
    ],
)
def test_session_length_out_of_range_is_refused(tmp_path: Path, name: str, text: str) -> None:
    assert f"AIJOBS_{name}" in refused(tmp_path, **{name: text})


def test_session_lengths_may_be_fractions(tmp_path: Path) -> None:
    settings = load(tmp_path, SESSION_IDLE_HOURS="0.25", SESSION_MAX_DAYS="0.5")
    assert (settings.session_idle_hours, settings.session_max_days) == (0.25, 0.5)
    assert (load(tmp_path).session_idle_hours, load(tmp_path).session_max_days) == (12, 7)


PERIODS = (
    "DISPATCHER_S",
    "REAPER_S",
    "REDRIVE_S",
    "CLAIM_TTL_S",
    "CLAIM_RELEASE_S",
    "CLEANUP_S",
    "WATCHER_S",
    "DISPATCH_BATCH",
    "BODY_LIMIT_BYTES",
)


@pytest.mark.parametrize("name", PERIODS)
def test_period_of_a_pass_must_be_positive(tmp_path: Path, name: str) -> None:
    assert f"AIJOBS_{name}" in refused(tmp_path, **{name: "0"})
    assert f"AIJOBS_{name}" in refused(tmp_path, **{name: "-1"})
    assert f"AIJOBS_{name}" in refused(tmp_path, **{name: "soon"})


@pytest.mark.parametrize("port", ["-1", "65536", "http", "80.5"])
def test_invalid_port_is_refused(tmp_path: Path, port: str) -> None:
    assert "AIJOBS_PORT" in refused(tmp_path, PORT=port)


def test_invalid_log_level_is_refused(tmp_path: Path) -> None:
    assert "AIJOBS_LOG_LEVEL" in refused(tmp_path, LOG_LEVEL="LOUD")
    assert load(tmp_path, LOG_LEVEL="debug").log_level.upper() == "DEBUG"


@pytest.mark.parametrize(("quota", "days"), [("DAY_JOBS", 1), ("MONTH_TOKENS", 31), ("MONTH_COST_MICROS", 31)])
def test_quota_longer_than_the_retention_of_jobs_is_refused(tmp_path: Path, quota: str, days: int) -> None:
    assert "AIJOBS_JOB_DAYS" in refused(tmp_path, JOB_DAYS=str(days - 1), **{f"QUOTA_{quota}": "5"})
    assert load(tmp_path, JOB_DAYS=str(days), **{f"QUOTA_{quota}": "5"}).job_days == days
    assert load(tmp_path, JOB_DAYS=str(days - 1)).job_days == days - 1


# --- production ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", sorted(SECRETS))
def test_production_refuses_development_keys_and_names_them(tmp_path: Path, missing: str) -> None:
    load(tmp_path)  # Create development keys, which must not be used.
    given = {name.removeprefix("AIJOBS_"): value for name, value in SECRETS.items() if name != missing}
    line = refused(tmp_path, ENV="production", REDIS_URL="redis://r/0", **given)
    assert missing in line
    assert not [name for name in SECRETS if name != missing and name in line]


def test_production_without_keys_names_all_and_creates_none(tmp_path: Path) -> None:
    line = refused(tmp_path / "instance", ENV="production", REDIS_URL="redis://r/0")
    assert all(name in line for name in SECRETS)
    assert not (tmp_path / "instance").exists()


def test_production_requires_a_broker(tmp_path: Path) -> None:
    given = {name.removeprefix("AIJOBS_"): value for name, value in SECRETS.items()}
    assert "AIJOBS_REDIS_URL" in refused(tmp_path, ENV="production", **given)
    settings = load(tmp_path / "instance", ENV="production", REDIS_URL="redis://r/0", BIND="0.0.0.0", **given)
    assert settings.production
    assert settings.development_keys == ()
    assert not (tmp_path / "instance").exists()


@pytest.mark.parametrize("env", ["prod", "Production", "staging", "test"])
def test_unknown_environment_is_refused(tmp_path: Path, env: str) -> None:
    assert "AIJOBS_ENV" in refused(tmp_path, ENV=env)


LOCAL = {
    "DATABASE_URL": [
        "sqlite:////tmp/x.db",
        "postgresql+psycopg://u@localhost/x",
        "postgresql+psycopg://u@127.0.0.1:5433/x",
        "postgresql+psycopg:///x",
        "postgresql+psycopg:///x?host=/var/run/postgresql",
        "mysql+pymysql://u@[::1]:3306/x",
        "mysql+pymysql:///x?unix_socket=/run/mysqld/mysqld.sock",
    ],
    "REDIS_URL": ["redis://localhost", "redis://:p@127.0.0.1:6379/3", "unix:///run/redis.sock?db=1"],
    "BIND": ["127.0.0.1", "::1", "localhost"],
}
REMOTE = {
    "DATABASE_URL": [
        "postgresql+psycopg://u@db.example.org/x",
        "postgresql+psycopg://u@10.0.0.5/x",
        "postgresql+psycopg:///x?host=db.example.org",
        "postgresql+psycopg:///x?host=localhost&host=db.example.org",
        "postgresql+psycopg://u@localhost/x?hostaddr=10.0.0.5",
        "mysql+pymysql://u@localhost/x?host=db.example.org",
        "mysql+pymysql://u@localhost.example.org/x",
    ],
    "REDIS_URL": ["redis://r.example.org:6379/0", "rediss://10.0.0.5", "redis:///0?host=r.example.org"],
    "BIND": ["0.0.0.0", "::", "192.168.1.5", "example.org"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in LOCAL.items() for value in values])
def test_local_address_needs_no_named_environment(tmp_path: Path, name: str, value: str) -> None:
    assert getattr(load(tmp_path, **{name: value}), name.lower()) == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REMOTE.items() for value in values])
def test_remote_address_requires_a_named_environment(tmp_path: Path, name: str, value: str) -> None:
    line = refused(tmp_path, **{name: value})
    assert f"AIJOBS_{name}" in line
    assert "AIJOBS_ENV" in line
    assert getattr(load(tmp_path, ENV="development", **{name: value}), name.lower()) == value


@pytest.mark.parametrize("name", ["DATABASE_URL", "REDIS_URL"])
def test_invalid_address_is_refused_without_its_password(tmp_path: Path, name: str) -> None:
    line = refused(tmp_path, **{name: "postgresql://u:hunter2@[::1/x"})
    assert f"AIJOBS_{name}" in line
    assert "hunter2" not in line


SERVE = [sys.executable, "-c", "import aijobs.web.wsgi"]


def test_web_process_on_development_keys_requires_a_named_environment(tmp_path: Path, processes: Processes) -> None:
    """gunicorn's address is only on its command line, so settings can't tell whether it serves other machines."""
    env = {"AIJOBS_INSTANCE_PATH": str(tmp_path), "AIJOBS_REDIS_URL": "redis://127.0.0.1:1"}
    program = processes.spawn(SERVE, env=env)
    assert program.wait() == 3
    assert program.output.count("\n") == 1
    assert "AIJOBS_ENV" in program.output
    given = processes.spawn(SERVE, env={**env, **SECRETS})
    named = processes.spawn(SERVE, env={**env, "AIJOBS_ENV": "development"})
    for served in (given, named):  # They are refused for the next check, the schema.
        assert served.wait() == 3
        assert "aijobs db upgrade" in served.output
    command = processes.spawn([sys.executable, "-m", "flask", "--app", "aijobs.web.wsgi", "routes"], env=env)
    assert command.wait() == 0


# --- keys ----------------------------------------------------------------------------------------------------------


def test_key_ring_is_newest_first_and_keeps_old_keys() -> None:
    ring = KeyRing.parse(f"k2:{'b' * 32}, k1:{'a' * 40}", "N")
    assert ring.current == ("k2", b"b" * 32)
    assert (ring.get("k1"), ring.get("k2"), ring.get("k3")) == (b"a" * 40, b"b" * 32, None)
    assert KeyRing.parse(f"k1:{'a:b' * 20}", "N").current[1] == b"a:b" * 20


@pytest.mark.parametrize(
    "text",
    [
        "",
        "secret" * 10,
        f"k1:{'a' * 31}",
        f":{'a' * 32}",
        f"k 1:{'a' * 32}",
        f"{'k' * 17}:{'a' * 32}",
        f"k1:{'a' * 32},",
        f"k1:{'a' * 32},k1:{'b' * 32}",
        f"k1: {'a' * 32}",
        f"k1:{'a' * 32};k2:{'b' * 32}x:{'a' * 32},k3",
    ],
)
def test_invalid_key_ring_is_refused_by_name_without_its_secrets(text: str) -> None:
    with pytest.raises(SettingsError) as error:
        KeyRing.parse(text, "AIJOBS_MESSAGE_KEYS")
    assert "AIJOBS_MESSAGE_KEYS" in str(error.value)
    assert "aaaa" not in str(error.value)


@pytest.mark.parametrize("name", ["SECRET_KEY", "JWT_SECRET", "MESSAGE_KEYS"])
def test_too_short_secret_is_refused_by_name(tmp_path: Path, name: str) -> None:
    line = refused(tmp_path, **{name: "hunter2"})
    assert f"AIJOBS_{name}" in line
    assert "hunter2" not in line


CONFIDENTIAL = {
    **SECRETS,
    "AIJOBS_SERVICE_TOKEN": "t" * 32,
    "AIJOBS_DEEPSEEK_API_KEY": "sk-1",
    "DEEPSEEK_API_KEY": "sk-2",
}


@pytest.mark.parametrize("around", ["{}\n", "{}\r\n", "{}\n\n", " {} ", "\t{}"])
@pytest.mark.parametrize("name", CONFIDENTIAL)
def test_white_space_around_a_secret_is_ignored(tmp_path: Path, name: str, around: str) -> None:
    environ = {"AIJOBS_INSTANCE_PATH": str(tmp_path), **SECRETS}
    plain = Settings.load({**environ, name: CONFIDENTIAL[name]})
    assert Settings.load({**environ, name: around.format(CONFIDENTIAL[name])}) == plain


@pytest.mark.parametrize("spoilt", ["{}\n{}", "\ufeff{}", "{}\r{}", "{}\x00", "{}\u200b", "{}\udc80"])
@pytest.mark.parametrize("name", CONFIDENTIAL)
def test_secret_with_an_invisible_character_is_refused_by_name(tmp_path: Path, name: str, spoilt: str) -> None:
    value = CONFIDENTIAL[name]
    with pytest.raises(SettingsError) as refused:
        Settings.load({"AIJOBS_INSTANCE_PATH": str(tmp_path), name: spoilt.format(value, value)})
    line = str(refused.value)
    assert (name in line) or "API key of deepseek" in line
    assert value not in line
    assert "\n" not in line


@pytest.mark.parametrize("quote", ["'", '"'])
@pytest.mark.parametrize("name", [*SECRETS, "AIJOBS_SERVICE_TOKEN"])
def test_quoted_secret_is_refused_by_name(tmp_path: Path, name: str, quote: str) -> None:
    line = refused(tmp_path, **{name.removeprefix("AIJOBS_"): f"{quote}{CONFIDENTIAL[name]}{quote}"})
    assert name in line
    assert CONFIDENTIAL[name] not in line


def test_value_of_white_space_means_the_default(tmp_path: Path) -> None:
    settings = load(tmp_path, JWT_SECRET=" \n", SERVICE_TOKEN="\n", LEASE_S=" ")
    assert ("jwt_secret" in settings.development_keys, settings.service_token, settings.lease_s) == (True, "", 60)


def test_development_keys_are_created_once_and_private(tmp_path: Path) -> None:
    first, second = load(tmp_path), load(tmp_path)
    assert (first.secret_key, first.jwt_secret, first.message_keys.keys) == (
        second.secret_key,
        second.jwt_secret,
        second.message_keys.keys,
    )
    (path,) = list(tmp_path.iterdir())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len({first.secret_key, first.jwt_secret, first.message_keys.current[1].decode()}) == 3


def test_given_secret_is_used_beside_development_keys(tmp_path: Path) -> None:
    settings = load(tmp_path, JWT_SECRET="g" * 40)
    assert settings.jwt_secret == "g" * 40
    assert settings.development_keys == ("secret_key", "message_keys", "credential_keys")


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", '"text"', "{}", '{"secret_key": 1}'])
def test_broken_key_file_is_named_and_not_overwritten(tmp_path: Path, content: str) -> None:
    path = tmp_path / "development-keys.json"
    path.write_text(content)
    assert str(path) in refused(tmp_path)
    assert path.read_text() == content


def test_instance_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file" / "instance") in refused(tmp_path / "file" / "instance")


LOADER = """
import sys, time
from pathlib import Path
from aijobs.settings import Settings
print("ready", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.0005)
s = Settings.load({"AIJOBS_INSTANCE_PATH": sys.argv[2]})
print(s.secret_key, s.jwt_secret, s.message_keys.current[1].decode(), flush=True)
"""


def test_processes_that_start_concurrently_use_the_same_keys(tmp_path: Path, processes: Processes) -> None:
    folder, go = tmp_path / "instance", tmp_path / "go"
    started = [processes.spawn([sys.executable, "-c", LOADER, str(go), str(folder)]) for _ in range(8)]
    for program in started:
        program.wait_for_output("ready")
    go.touch()
    assert [program.wait() for program in started] == [0] * 8
    assert len({program.output for program in started}) == 1
    assert [path.name for path in folder.iterdir()] == ["development-keys.json"]


# --- broker --------------------------------------------------------------------------------------------------------


def test_broker_is_the_configured_or_the_running_embedded_one(tmp_path: Path) -> None:
    assert load(tmp_path, REDIS_URL="redis://localhost/1").broker_url() == "redis://localhost/1"
    settings = load(tmp_path)
    with pytest.raises(SettingsError, match="AIJOBS_REDIS_URL"):
        settings.broker_url()
    (tmp_path / "broker.json").write_text(json.dumps({"url": "unix:///x"}))
    assert settings.broker_url() == "unix:///x"
    for broken in ("", "{}", "[]", "null"):
        (tmp_path / "broker.json").write_text(broken)
        with pytest.raises(SettingsError, match="AIJOBS_REDIS_URL"):
            settings.broker_url()
