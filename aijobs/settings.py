"""Every setting with its default, and the only reader of the environment (prefix `AIJOBS_`)."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from difflib import get_close_matches
from logging import getLevelNamesMapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from aijobs.addresses import broker_address, database_address, host_and_query
from aijobs.errors import SettingsError
from aijobs.machine import create_private

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent
"""The folder above the package: the project in a checkout, site-packages in an installation."""
IN_CHECKOUT = (CHECKOUT / "pyproject.toml").is_file()


def resource(name: str) -> Path:
    """Return the folder `templates`, `static` or `migrations`: inside an installed package, beside it in a checkout."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else CHECKOUT / name


def _default_instance_path() -> Path:
    """Return `instance/` of the checkout; for an installed wheel Flask's place, below the environment."""
    if IN_CHECKOUT:
        return CHECKOUT / "instance"
    return Path(sys.prefix) / "var" / "aijobs-instance"


@dataclass(frozen=True)
class KeyRing:
    """Secrets by id. The first one is in use; the others still verify what they signed."""

    keys: tuple[tuple[str, bytes], ...] = field(repr=False)

    @property
    def current(self) -> tuple[str, bytes]:
        return self.keys[0]

    def get(self, key_id: str) -> bytes | None:
        """Return the secret with this id, or None."""
        return dict(self.keys).get(key_id)

    @classmethod
    def parse(cls, text: str, name: str) -> KeyRing:
        """Parse `k2:secret,k1:secret`, newest first. `SettingsError` names `name` for anything else."""
        keys = []
        for part in text.split(","):
            key_id, _, secret = part.strip().partition(":")
            if not key_id.isalnum() or len(key_id) > 16 or len(secret) < 32 or secret != secret.strip():
                raise SettingsError(
                    f"{name}: write id:secret[,id:secret…], newest first; ids are letters and digits, "
                    "secrets have at least 32 characters"
                )
            keys.append((key_id, secret.encode()))
        if len(dict(keys)) != len(keys):
            raise SettingsError(f"{name}: an id stands twice")
        return cls(tuple(keys))


@dataclass(frozen=True)
class Settings:
    """The settings of a process. The end of a name is its unit: `_s` (seconds), `_hours` or `_days`."""

    env: str = "development"
    """`production` refuses development keys and a missing broker."""
    env_was_set: bool = False
    instance_path: Path = field(default_factory=_default_instance_path)

    # Where things are
    database_url: str = field(default="", repr=False)
    """Empty: SQLite in `instance/aijobs.db`."""
    redis_url: str = field(default="", repr=False)
    """Empty (in development only): the embedded broker of `instance/broker.json`."""
    bind: str = "127.0.0.1"
    port: int = 8000
    trusted_proxies: int = 0
    """Number of reverse proxies before the web process. 0: `X-Forwarded-…` headers are ignored."""

    # Secrets: made once in instance/ in development, demanded in production
    secret_key: str = field(default="", repr=False)
    message_keys: KeyRing = field(default=KeyRing(()), repr=False)
    jwt_secret: str = field(default="", repr=False)
    jwt_audience: str = ""
    """Empty: any audience is accepted."""
    credential_keys: KeyRing = field(default=KeyRing(()), repr=False)
    """Keys that encrypt users' own provider keys, newest first."""
    development_keys: tuple[str, ...] = ()
    """The secrets above that were generated in `instance/`."""
    service_token: str = field(default="", repr=False)
    """Lets a runtime service read a user's key. Empty: no service can."""

    # AI providers
    providers: str = ""
    """A providers file. Empty: DeepSeek if it has a key, otherwise the built-in provider."""
    provider_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The platform's own keys by provider, from `AIJOBS_{PROVIDER}_API_KEY` (and `DEEPSEEK_API_KEY`)."""
    prices: str = ""
    """A price list. Empty: the built-in one."""
    safety_rules: str = ""
    """A file of safety rules on top of the built-in ones."""
    breaker_failures: int = 5
    """Failures in a row that open a provider's breaker."""
    breaker_open_s: float = 30
    """The first open time. Each further one is twice as long, up to ten times this."""
    provider_patience_s: float = 3600
    """How long a job is postponed, uncounted, while no provider is available."""

    # Leases
    lease_s: float = 60
    heartbeat_s: float = 15
    lease_grace_s: float = 30
    """Time after `lock_until` until a lease counts as lost."""

    # Passes
    dispatcher_s: float = 1
    reaper_s: float = 30
    redrive_s: float = 10
    redrive_due_s: float = 5
    """How long a job is overdue before its message is looked for."""
    claim_ttl_s: float = 60
    claim_release_s: float = 30
    cleanup_s: float = 3600
    dispatch_batch: int = 100
    handover_delay_s: float = 1
    """The delay of a new job's event: its creator sends first, and the dispatcher sends what was missed."""

    # Workers
    shutdown_grace_s: float = 25
    watcher_s: float = 0.5
    """How often a worker checks cancel requests and deadlines of its running jobs."""
    stuck_attempt_s: float = 30
    """How long an attempt's code may run past its end before the process abandons it and exits with 75."""

    job_timeouts: Mapping[str, float] = field(default_factory=dict)
    """Seconds per attempt by job type, instead of the definition's: `flashcard_generation=300,…`."""

    # Limits
    body_limit_bytes: int = 1_000_000
    user_active_jobs: int = 20
    """Maximum jobs of one user that aren't final; 0: no limit. The same holds for each quota below."""
    quota_day_jobs: int = 0
    quota_day_tokens: int = 0
    quota_day_cost_micros: int = 0
    """In micro-units of the price list's currency. Days and months are UTC's."""
    quota_month_jobs: int = 0
    quota_month_tokens: int = 0
    quota_month_cost_micros: int = 0

    # Sessions of operators
    session_idle_hours: float = 12
    """A session ends after this time without use. A page that refreshes itself doesn't count as use."""
    session_max_days: float = 7
    """A session ends this long after its sign-in, even if it is used."""

    # Retention
    job_days: int = 180
    """Days after a job's end. A chain of retries is deleted as a whole, when its newest job is that old."""
    snapshot_days: int = 30
    tombstone_days: int = 365

    log_level: str = "INFO"
    run_by_flask: bool = False
    """Whether the `flask` command runs this process (Flask sets it, without our prefix)."""

    @property
    def production(self) -> bool:
        return self.env == "production"

    def seconds(self, name: str) -> timedelta:
        """Return the setting `{name}_s` as a duration."""
        return timedelta(seconds=getattr(self, f"{name}_s"))

    def broker_url(self) -> str:
        """Return `redis_url`, or the embedded broker's address in `instance/broker.json`.

        `SettingsError` if there is neither. It isn't checked whether a server listens there.
        """
        if self.redis_url:
            return self.redis_url
        try:
            return str(json.loads((self.instance_path / "broker.json").read_text())["url"])
        except (OSError, ValueError, KeyError, TypeError):
            raise SettingsError("no broker: set AIJOBS_REDIS_URL, or start the embedded one with `aijobs up`") from None

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Return the settings of `environ` (default: the process's). `SettingsError` names the first that is missing or
        wrong.
        """
        return _load(os.environ if environ is None else environ)


_NUMBERS = {f.name: f.type for f in fields(Settings) if f.type in ("int", "float")}
_SECRETS = ("secret_key", "message_keys", "jwt_secret", "credential_keys")
_CONFIDENTIAL = (*_SECRETS, "service_token")
_TEXTS = (
    "database_url",
    "redis_url",
    "bind",
    "jwt_audience",
    "log_level",
    "service_token",
    "providers",
    "prices",
    "safety_rules",
)


_OTHERS = ("env", "instance_path", "job_timeouts")
_KNOWN = {f"AIJOBS_{name.upper()}": name for name in (*_OTHERS, *_TEXTS, *_SECRETS, *_NUMBERS)}
_SECONDS = re.compile(r"\d{1,3}(?:\.\d{1,3})?", re.ASCII)
_WHOLE = re.compile(r"\d+", re.ASCII)
_FRACTION = re.compile(r"\d+(?:\.\d*)?|\.\d+", re.ASCII)
_PROVIDER_KEY = re.compile(r"AIJOBS_(?P<provider>[A-Z][A-Z0-9_]*)_API_KEY")


def _load(environ: Mapping[str, str]) -> Settings:
    given = _given(environ)
    values: dict[str, Any] = {name: given[name] for name in _TEXTS if name in given}
    if "log_level" in values:
        values["log_level"] = values["log_level"].upper()
    for name, kind in _NUMBERS.items():
        if name in given:
            values[name] = _number(name, given[name], int if kind == "int" else float)
    values["env"] = given.get("env", "development")
    values["env_was_set"] = "env" in given
    values["run_by_flask"] = environ.get("FLASK_RUN_FROM_CLI") == "true"
    if values["env"] not in ("development", "production"):
        raise SettingsError(f"AIJOBS_ENV is {values['env']!r}; it is development or production")
    instance = Path(given["instance_path"]).absolute() if "instance_path" in given else _default_instance_path()
    values["instance_path"] = instance
    given_url = values.get("database_url")
    values["database_url"] = database_address(given_url) if given_url else f"sqlite:///{instance / 'aijobs.db'}"
    if "redis_url" in values:
        values["redis_url"] = broker_address(values["redis_url"])
    values.update(_secrets(given, instance, production=values["env"] == "production"))
    values["provider_keys"] = _provider_keys(environ)
    values["job_timeouts"] = _job_timeouts(given.get("job_timeouts", ""))
    settings = Settings(**values)
    _check(settings)
    return settings


def _given(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the given values by the setting's name, without spaces and line breaks around them.

    A misspelled name is refused, because its value would be ignored silently.
    """
    set_ones = {name: text for name, value in environ.items() if name.startswith("AIJOBS_") and (text := value.strip())}
    names = [name for name in set_ones if not _PROVIDER_KEY.fullmatch(name)]
    for name in names:
        if name not in _KNOWN:
            near = get_close_matches(name, _KNOWN, n=1)
            raise SettingsError(f"{name} is no setting" + (f"; is {near[0]} meant?" if near else ""))
        _check_text(name, set_ones[name])
    return {_KNOWN[name]: set_ones[name] for name in names}


def _check_text(name: str, text: str) -> None:
    """Refuse a line break inside, a byte order mark, and bytes that are no text."""
    if not text.isprintable():
        raise SettingsError(f"{name} holds a line break or another character that can't be seen")
    if _KNOWN[name] in _CONFIDENTIAL and len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        raise SettingsError(f"{name} stands in quotes, which would be part of it: leave them out")


def _provider_keys(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the platform's keys by provider. The providers file knows which exist."""
    keys = {"deepseek": environ.get("DEEPSEEK_API_KEY", "").strip()}
    for name, value in environ.items():
        if value.strip() and (found := _PROVIDER_KEY.fullmatch(name)):
            keys[found["provider"].lower()] = value.strip()
    for provider, key in keys.items():
        if not key.isascii() or not key.isprintable():
            raise SettingsError(f"the API key of {provider} has a character that no key has")
    return {provider: key for provider, key in keys.items() if key}


def _job_timeouts(text: str) -> dict[str, float]:
    """Parse `type=seconds,type=seconds`, by type."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        job_type, equals, seconds = (piece.strip() for piece in part.partition("="))
        if not (job_type and equals and _SECONDS.fullmatch(seconds)) or not 1 <= float(seconds) <= 600:
            raise SettingsError(f"AIJOBS_JOB_TIMEOUTS has {part!r}: write type=seconds,…, with 1 to 600 seconds")
        if job_type in found:
            raise SettingsError(f"AIJOBS_JOB_TIMEOUTS names {job_type} twice")
        found[job_type] = float(seconds)
    return found


def _number(name: str, text: str, kind: type[int] | type[float]) -> float:
    form, told = (_WHOLE, "a whole number") if kind is int else (_FRACTION, "a number")
    if not form.fullmatch(text):
        raise SettingsError(f"AIJOBS_{name.upper()} is {text!r}; it is {told}, 0 or more")
    if float(text) >= 1e9:
        raise SettingsError(f"AIJOBS_{name.upper()} is {text[:20]}; it is below 1000000000")
    return kind(text)


def _secrets(given: Mapping[str, str], instance: Path, *, production: bool) -> dict[str, Any]:
    missing = [name for name in _SECRETS if name not in given]
    if missing and production:
        listed = ", ".join(f"AIJOBS_{name.upper()}" for name in missing)
        raise SettingsError(f"production refuses to start on development keys: set {listed}")
    made = _development_secrets(instance) if missing else {}
    found = {name: given.get(name) or made[name] for name in _SECRETS}
    for name in ("secret_key", "jwt_secret"):
        if len(found[name]) < 32:
            raise SettingsError(f"AIJOBS_{name.upper()} is too short: use at least 32 characters")
    return {
        "secret_key": found["secret_key"],
        "jwt_secret": found["jwt_secret"],
        "message_keys": KeyRing.parse(found["message_keys"], "AIJOBS_MESSAGE_KEYS"),
        "credential_keys": KeyRing.parse(found["credential_keys"], "AIJOBS_CREDENTIAL_KEYS"),
        "development_keys": tuple(missing),
    }


def _development_secrets(instance: Path) -> dict[str, str]:
    """Return the secrets in `instance/development-keys.json`, created at the first call, readable by the owner alone.

    Several processes may start at once: the file appears whole, and later ones read it.
    """
    path = instance / "development-keys.json"
    try:
        if not path.exists():
            _make_secrets(path)
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{path} can't be made or read ({type(error).__name__}): name another folder in AIJOBS_INSTANCE_PATH"
        ) from None
    if not isinstance(found, dict) or not all(isinstance(found.get(name), str) for name in _SECRETS):
        raise SettingsError(f"{path} doesn't hold {', '.join(_SECRETS)}: delete it to have new keys made")
    return found


def _make_secrets(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = {name: secrets.token_hex(32) for name in _SECRETS}
    for ring in ("message_keys", "credential_keys"):
        made[ring] = f"d1:{made[ring]}"
    create_private(path, json.dumps(made))  # If another process was first, its keys count.


_LOCAL_HOSTS = frozenset({"", "localhost", "127.0.0.1", "::1"})


_ABOVE_ZERO = (
    "dispatcher_s reaper_s redrive_s claim_ttl_s claim_release_s cleanup_s watcher_s dispatch_batch body_limit_bytes "
    "breaker_failures breaker_open_s"
).split()
"""Settings that must be above 0: a pass without a pause, or with an empty batch, would be useless."""

_BOUNDED = (("session_idle_hours", 0.1, 8760), ("session_max_days", 0.1, 365))
"""Limits: the last use of a session is recorded once a minute, and no database subtracts a million years."""


def _check(s: Settings) -> None:
    if s.heartbeat_s <= 0 or s.heartbeat_s * 2 > s.lease_s:
        raise SettingsError(
            f"AIJOBS_HEARTBEAT_S is {s.heartbeat_s:g}: it is above 0 and at most half of AIJOBS_LEASE_S ({s.lease_s:g})"
        )
    for name in _ABOVE_ZERO:
        if getattr(s, name) <= 0:
            raise SettingsError(f"AIJOBS_{name.upper()} is 0; it is above 0")
    if s.port > 65535:
        raise SettingsError(f"AIJOBS_PORT is {s.port}; it is at most 65535")
    if s.log_level not in getLevelNamesMapping():
        raise SettingsError(f"AIJOBS_LOG_LEVEL is {s.log_level!r}; it is DEBUG, INFO, WARNING or ERROR")
    if s.service_token and len(s.service_token) < 32:
        raise SettingsError("AIJOBS_SERVICE_TOKEN is too short: use at least 32 characters")
    for name, least, most in _BOUNDED:
        if not least <= getattr(s, name) <= most:
            raise SettingsError(f"AIJOBS_{name.upper()} is {getattr(s, name):g}; it is {least} to {most}")
    _check_quotas(s)
    if s.production and not s.redis_url:
        raise SettingsError("production needs a broker: set AIJOBS_REDIS_URL")
    _check_reach(s)


def _check_quotas(s: Settings) -> None:
    """Check that rows are kept as long as quotas count them."""
    for period, days in (("day", 1), ("month", 31)):
        limited = any(getattr(s, f"quota_{period}_{what}") for what in ("jobs", "tokens", "cost_micros"))
        if limited and s.job_days < days:
            raise SettingsError(
                f"AIJOBS_JOB_DAYS is {s.job_days}: with a quota for each {period} jobs are kept for {days} days or more"
            )


def _check_reach(s: Settings) -> None:
    """Refuse connections to or from other machines until AIJOBS_ENV is set."""
    beyond = {
        "AIJOBS_DATABASE_URL": _remote_hosts("AIJOBS_DATABASE_URL", s.database_url),
        "AIJOBS_REDIS_URL": _remote_hosts("AIJOBS_REDIS_URL", s.redis_url),
        "AIJOBS_BIND": [] if s.bind in _LOCAL_HOSTS else [s.bind],
    }
    for name, hosts in beyond.items():
        if hosts and not s.env_was_set:
            raise SettingsError(
                f"{name} is beyond this machine ({', '.join(hosts)}): set AIJOBS_ENV to production or development"
            )


def _remote_hosts(name: str, url: str) -> list[str]:
    """Return the other machines of an address, also those in its query; a path is a socket."""
    host, query = host_and_query(name, url)
    hosts = [host]
    hosts += [host for key, value in parse_qsl(query) if key in ("host", "hostaddr") for host in value.split(",")]
    return [host for host in hosts if host not in _LOCAL_HOSTS and not host.startswith("/")]


def plain_terminal(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether output has no colours: NO_COLOR is set, or the terminal is dumb."""
    given = os.environ if environ is None else environ
    return bool(given.get("NO_COLOR")) or given.get("TERM") == "dumb"
