"""Start-up parameters of a PostgreSQL connection: a pooler refuses those that it doesn't know."""

from __future__ import annotations

import socket
import struct
import threading

import pytest
from sqlalchemy.exc import OperationalError

from aijobs.db.engines import build_engine

POOLERS_TAKE = {"user", "database", "client_encoding", "application_name", "datestyle", "timezone"}
"""Parameters that PgBouncer accepts by default."""
_SSL_REQUEST, _GSS_REQUEST = 80877103, 80877104


class StartUpReader:
    """A server that reads one start-up message and closes."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.parameters: dict[str, str] = {}
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._thread.join(10)
        self._socket.close()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection, connection.makefile("rb") as stream:
            while not self.parameters:
                (length, code) = struct.unpack("!II", stream.read(8))
                body = stream.read(length - 8)
                if code in (_SSL_REQUEST, _GSS_REQUEST):
                    connection.sendall(b"N")
                    continue
                parts = body.rstrip(b"\0").decode().split("\0")
                self.parameters = dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("patient", [False, True])
def test_connection_starts_only_with_parameters_that_a_pooler_accepts(patient: bool) -> None:
    server = StartUpReader()
    engine = build_engine(f"postgresql+psycopg://u:p@127.0.0.1:{server.port}/db", patient=patient)
    with pytest.raises(OperationalError):
        engine.connect()
    engine.dispose()
    server.close()
    assert set(server.parameters) >= {"user", "database"}
    assert set(server.parameters) <= POOLERS_TAKE
