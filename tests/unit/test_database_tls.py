"""What a MariaDB or MySQL connection is asked to encrypt."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event

from aijobs.db_engine import build_engine


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


@pytest.mark.parametrize(
    "address", ["localhost", "127.0.0.1:3307", "127.1.2.3", "[::1]:3306", "/d?unix_socket=/run/mysqld/mysqld.sock"]
)
def test_a_server_on_this_machine_costs_no_reading_of_certificates_for_each_connection(address: str) -> None:
    assert dial(f"mysql+pymysql://u:p@{address}" + ("" if "/d" in address else "/d"))["ssl_disabled"] is True


@pytest.mark.parametrize("address", ["db.example", "localhost.example", "10.0.0.7", "[2001:db8::7]:3306"])
def test_what_leaves_the_machine_is_encrypted_where_the_server_can(address: str) -> None:
    assert "ssl_disabled" not in dial(f"mariadb+pymysql://u:p@{address}/d")


def test_what_the_address_says_of_tls_stands_on_this_machine_too() -> None:
    arguments = dial("mysql+pymysql://u:p@127.0.0.1/d?ssl_ca=/etc/ca.pem")
    assert "ssl_disabled" not in arguments
    assert arguments["ssl"] == {"ca": "/etc/ca.pem"}
