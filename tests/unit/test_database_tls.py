"""TLS settings of MariaDB and MySQL connections."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event

from aijobs.db.engines import build_engine
from aijobs.errors import SettingsError


class _Dialled(Exception):
    """Raised instead of connecting."""


def dial(url: str) -> dict[str, Any]:
    """Return the arguments with which the driver would be called."""
    engine = build_engine(url)

    @event.listens_for(engine, "do_connect")
    def stop(_dialect: Any, _record: Any, _positional: Any, arguments: dict[str, Any]) -> None:
        raise _Dialled(arguments)

    with pytest.raises(_Dialled) as caught:
        engine.connect()
    arguments: dict[str, Any] = caught.value.args[0]
    return arguments


@pytest.mark.parametrize("address", ["127.0.0.1:3307/d", "db.example/d", "localhost/d?host=db.example"])
def test_tls_is_not_disabled_for_any_host(address: str) -> None:
    """On this machine too: the local port may be a tunnel to another host."""
    assert not [key for key in dial(f"mysql+pymysql://u:p@{address}") if key.startswith("ssl")]


@pytest.mark.parametrize(("said", "disabled"), [("false", False), ("0", False), ("true", True), ("True", True)])
def test_text_false_for_ssl_disabled_does_not_disable_tls(said: str, disabled: bool) -> None:
    """The driver treats the text `false` as true."""
    assert dial(f"mariadb+pymysql://u:p@db.example/d?ssl_disabled={said}")["ssl_disabled"] is disabled


@pytest.mark.parametrize("said", ["maybe", "false&ssl_disabled=true"])
def test_invalid_value_of_ssl_disabled_is_refused(said: str) -> None:
    with pytest.raises(SettingsError, match=r"AIJOBS_DATABASE_URL: ssl_disabled is .*; it is true or false"):
        build_engine(f"mysql+pymysql://u:p@db.example/d?ssl_disabled={said}")


def test_address_that_requires_and_disables_tls_is_refused() -> None:
    """The driver would silently connect without TLS."""
    with pytest.raises(SettingsError, match="disables TLS, and asks for it by ssl_ca"):
        build_engine("mysql+pymysql://u:p@db.example/d?ssl_ca=/etc/ca.pem&ssl_disabled=true")


def test_certificate_in_the_address_is_required() -> None:
    arguments = dial("mysql+pymysql://u:p@127.0.0.1/d?ssl_ca=/etc/ca.pem")
    assert "ssl_disabled" not in arguments
    assert arguments["ssl"] == {"ca": "/etc/ca.pem"}
