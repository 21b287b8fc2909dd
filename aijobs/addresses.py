"""Convert the addresses of database and broker, as platforms give them, to the form of our drivers.

Each refusal is one line that names the setting and says what to write, without user and password.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import SplitResult, parse_qsl, urlsplit

from aijobs.errors import SettingsError

DATABASE, BROKER = "AIJOBS_DATABASE_URL", "AIJOBS_REDIS_URL"

_DRIVERS: Mapping[str, str] = {
    "sqlite": "sqlite",
    "sqlite3": "sqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
}
_GIVEN = frozenset(("sqlite+pysqlite", *_DRIVERS.values()))
_BROKERS: Mapping[str, str] = {
    "redis": "redis",
    "rediss": "rediss",
    "unix": "unix",
    "valkey": "redis",
    "valkeys": "rediss",
}
_FORMS = "sqlite:///FILE, postgresql://USER:PASSWORD@HOST/NAME or mysql://USER:PASSWORD@HOST/NAME"
_SHAPE = re.compile(
    r"(?P<scheme>[\w.+-]+)://(?:[^:/]*(?::[^@]*)?@)?"
    r"(?P<host>\[[^/?]*\]|[^/?:]*)(?::(?P<port>[^/?]*))?(?:/(?P<name>[^?]*))?(?:\?(?P<query>.*))?"
)
"""The same pattern as SQLAlchemy's: a password may hold anything but an @."""


def database_address(text: str) -> str:
    """Return the address with our driver. `SettingsError`."""
    found = _match(text := unquoted(text))
    scheme, rest = found["scheme"].lower(), text[len(found["scheme"]) :]
    family, _, driver = scheme.partition("+")
    if family not in _DRIVERS:
        raise SettingsError(f"{DATABASE} is for another kind of database: write {_FORMS}")
    if driver and scheme not in _GIVEN:
        raise SettingsError(f"{DATABASE}: the driver {driver} isn't supported; write {_DRIVERS[family]}://…")
    if _DRIVERS[family] == "sqlite":
        _check_file(found)
    else:
        _check_server(found, needs_name=family in ("mysql", "mariadb"))
    return (scheme if driver else _DRIVERS[family]) + rest


def broker_address(text: str) -> str:
    """Return the address with a scheme that the broker's client knows. `SettingsError`."""
    scheme, found, rest = unquoted(text).partition("://")
    if found and re.search("cluster|sentinel", scheme, re.IGNORECASE):
        raise SettingsError(f"{BROKER}: Redis Cluster and Sentinel aren't supported: write redis:// and one server")
    if not found or scheme.lower() not in _BROKERS:
        shown = scheme if found and scheme.isalnum() else "no scheme"
        raise SettingsError(f"{BROKER} can't be read ({shown}): write redis://, rediss:// or unix://")
    address = f"{_BROKERS[scheme.lower()]}://{rest}"
    try:
        bad = urlsplit(address).port == 0
    except ValueError:
        bad = True
    if bad:
        raise SettingsError(
            f"{BROKER}: the port is no number from 1 to 65535; in a password / is %2F, # is %23, ? is %3F and @ is %40"
        )
    _check_number(urlsplit(address))
    return address


def host_and_query(name: str, address: str) -> tuple[str, str]:
    """Return the host of the address in the setting `name`, and the part after `?`."""
    if name == DATABASE:
        found = _match(address)
        return found["host"].strip("[]"), found["query"] or ""
    parts = urlsplit(address)
    return parts.hostname or "", parts.query


def unquoted(text: str) -> str:
    """Return the text without the quotes of a settings file."""
    return text[1:-1].strip() if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _match(text: str) -> re.Match[str]:
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise SettingsError(f"{DATABASE} is not an address: write {_FORMS}")
    return found


def _check_number(parts: SplitResult) -> None:
    """Refuse a database number that the broker's client would read as another one."""
    given = [value for key, value in parse_qsl(parts.query, keep_blank_values=True) if key == "db"]
    if parts.scheme != "unix":
        given += filter(None, [parts.path.removeprefix("/").removesuffix("/")])
    if not all(value.isascii() and value.isdigit() for value in given):
        raise SettingsError(f"{BROKER}: the database is a number from 0; in a password / is %2F")


def _check_file(found: re.Match[str]) -> None:
    if found["host"] or found["port"]:
        raise SettingsError(
            f"{DATABASE} has two slashes: write sqlite:///FILE, or sqlite:////FOLDER/FILE for an absolute path"
        )
    if found["name"] in (None, "", ":memory:"):
        raise SettingsError(f"{DATABASE} names no file, so each process would have a database of its own")


def _check_server(found: re.Match[str], *, needs_name: bool) -> None:
    port = found["port"]
    if port and not (port.isascii() and port.isdigit() and 0 < int(port[:6]) <= 65535):
        raise SettingsError(f"{DATABASE}: the port is no number from 1 to 65535; in a password @ is %40 and : is %3A")
    if "@" in found["host"] or "@" in (port or ""):
        raise SettingsError(f"{DATABASE} has two @: the one in user or password is written %40")
    if needs_name and not found["name"]:
        raise SettingsError(f"{DATABASE} names no database: put its name behind the host, as in mysql://HOST/NAME")
