"""What a MariaDB or MySQL connection is asked to encrypt."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event

from aijobs.db.engines import build_engine
from aijobs.errors import SettingsError


class _Dialled(Exception):
    """Instead of a connection."""


def dial(url: str) -> dict[str, Any]:
    """What the driver would be called with."""
    engine = build_engine(url)

    @event.listens_for(engine, "do_connect")
    def stop(_dialect: Any, _record: Any, _positional: Any, arguments: dict[str, Any]) -> None:
        raise _Dialled(arguments)

    with pytest.raises(_Dialled) as caught:
        engine.connect()
    arguments: dict[str, Any] = caught.value.args[0]
    return arguments


@pytest.mark.parametrize("address", ["127.0.0.1:3307/d", "db.example/d", "localhost/d?host=db.example"])
def test_wherever_the_server_is_the_driver_encrypts_where_it_can(address: str) -> None:
    """On this machine too: what listens there may be the near end of a way that leaves it."""
    assert not [key for key in dial(f"mysql+pymysql://u:p@{address}") if key.startswith("ssl")]


@pytest.mark.parametrize(("said", "disabled"), [("false", False), ("0", False), ("true", True), ("True", True)])
def test_tls_that_an_address_does_not_disable_is_not_disabled(said: str, disabled: bool) -> None:
    """To the driver the text `false` is true."""
    assert dial(f"mariadb+pymysql://u:p@db.example/d?ssl_disabled={said}")["ssl_disabled"] is disabled


@pytest.mark.parametrize("said", ["maybe", "false&ssl_disabled=true"])
def test_what_cannot_be_understood_of_tls_is_refused_and_not_guessed(said: str) -> None:
    with pytest.raises(SettingsError, match=r"AIJOBS_DATABASE_URL: ssl_disabled is .*; it is true or false"):
        build_engine(f"mysql+pymysql://u:p@db.example/d?ssl_disabled={said}")


def test_an_address_that_demands_tls_and_disables_it_is_refused() -> None:
    """The driver would speak in clear, without a word."""
    with pytest.raises(SettingsError, match="disables TLS, and asks for it by ssl_ca"):
        build_engine("mysql+pymysql://u:p@db.example/d?ssl_ca=/etc/ca.pem&ssl_disabled=true")


def test_a_certificate_that_the_address_demands_is_demanded() -> None:
    arguments = dial("mysql+pymysql://u:p@127.0.0.1/d?ssl_ca=/etc/ca.pem")
    assert "ssl_disabled" not in arguments
    assert arguments["ssl"] == {"ca": "/etc/ca.pem"}
