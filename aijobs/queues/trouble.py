"""Explain an error of the broker: its state, and the cause in one line without URL, password or content."""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Iterator

import redis

from aijobs.errors import BrokerUnavailable
from aijobs.queues.state import AWAY, REFUSED, TAKES_NO_WRITES, UNSUPPORTED

_CODE = re.compile(r"(?:^|caused error: )([A-Z]{3,})\b")
_COMMAND = re.compile(r"run the '([\w|]+)' command")


def _n(text: str) -> str:
    """Mark a text for translation by the console."""
    return text


CLUSTER = _n("It is a Redis cluster, which aijobs can't use; it needs one server")
SENTINEL = _n("It is a Sentinel, which holds no data; use the address of the Redis server that it watches")
_SILENT = _n("It doesn't answer in time")
_SILENT_TO_TLS = _n("It doesn't answer in time; if its port isn't for TLS, write redis://")
_NO_TLS = _n("It doesn't speak TLS at this port; write redis://, or use its TLS port")
_TLS_PORT = _n("It closed the connection; if its port is for TLS, write rediss://")

_BY_CODE = {
    "OOM": (TAKES_NO_WRITES, _n("Its memory is full (maxmemory)")),
    "READONLY": (TAKES_NO_WRITES, _n("It is a read-only replica")),
    "UNBLOCKED": (TAKES_NO_WRITES, _n("It is a read-only replica")),  # It became a replica while a worker waited.
    "MISCONF": (TAKES_NO_WRITES, _n("It can't save its data to disk (MISCONF)")),
    "NOREPLICAS": (TAKES_NO_WRITES, _n("Too few replicas are connected to it (NOREPLICAS)")),
    "WRONGTYPE": (REFUSED, _n("One of our keys holds a value of another type (WRONGTYPE)")),
    "MASTERDOWN": (AWAY, _n("It is a replica without a primary (MASTERDOWN)")),
    "LOADING": (AWAY, _n("It is still loading its data")),
    "NOAUTH": (AWAY, _n("It asks for a password, and the address has none")),
    "WRONGPASS": (AWAY, _n("It refuses the password, or doesn't know the user")),
    **dict.fromkeys(("MOVED", "ASK", "CLUSTERDOWN", "CROSSSLOT", "TRYAGAIN"), (UNSUPPORTED, CLUSTER)),
}
_CODE_OF_CLASS = {
    redis.OutOfMemoryError: "OOM",
    redis.ReadOnlyError: "READONLY",
    redis.BusyLoadingError: "LOADING",
    redis.exceptions.MasterDownError: "MASTERDOWN",
    redis.exceptions.ClusterDownError: "CLUSTERDOWN",
    redis.exceptions.AskError: "ASK",
    redis.exceptions.TryAgainError: "TRYAGAIN",
    redis.exceptions.ClusterCrossSlotError: "CROSSSLOT",
}
_BY_TEXT = (
    ("Authentication required", _BY_CODE["NOAUTH"]),
    ("without any password configured", (AWAY, _n("It has no password, and the address has one"))),
    ("username-password pair", _BY_CODE["WRONGPASS"]),
    ("invalid password", _BY_CODE["WRONGPASS"]),
    ("max number of clients", (AWAY, _n("It has no connection to spare (maxclients)"))),
    ("DB index", (AWAY, _n("It has no database of the number in the address"))),
    ("Invalid Database", (AWAY, _n("It has no database of the number in the address"))),
    ("unknown command", (REFUSED, _n("It doesn't know one of our commands; Redis 7 or Valkey is required"))),
    ("CERTIFICATE_REQUIRED", (AWAY, _n("It asks for a client certificate (ssl_certfile, ssl_keyfile)"))),
)
_NO_TLS_REASONS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING", "PACKET_LENGTH")


def explain(error: BaseException, *, tls: bool = False) -> BrokerUnavailable:
    """Return the `BrokerUnavailable` for an error of the client. `tls`: whether the connection was to be encrypted."""
    state, cause, detail = _explain(error, tls)
    return BrokerUnavailable(f"{cause}: {detail}" if detail else cause, state)


def _explain(error: BaseException, tls: bool) -> tuple[str, str, str]:
    """Return the state, a text of this module, and a detail that the text doesn't have."""
    text = str(error)
    for kind, code in _CODE_OF_CLASS.items():
        if isinstance(error, kind):
            return *_BY_CODE[code], ""
    if isinstance(error, redis.exceptions.NoPermissionError):
        command = _COMMAND.search(text)
        return (
            REFUSED,
            _n("Its user has no right to one of our commands or keys (NOPERM)"),
            command[1] if command else "",
        )
    for part, found in _BY_TEXT:
        if part in text:
            return *found, ""
    if isinstance(error, redis.AuthenticationError):
        return *_BY_CODE["WRONGPASS"], ""
    if isinstance(error, redis.ResponseError):
        match = _CODE.search(text)
        code = match[1] if match else ""
        return *_BY_CODE.get(code, (REFUSED, _n("It refuses one of our commands"))), "" if code in _BY_CODE else code
    if isinstance(error, redis.InvalidResponse):
        return AWAY, _n("The server at this address doesn't speak the Redis protocol"), ""
    if isinstance(error, redis.TimeoutError) or any(isinstance(cause, TimeoutError) for cause in _chain(error)):
        return AWAY, _SILENT_TO_TLS if tls else _SILENT, ""
    for cause in _chain(error):
        if isinstance(cause, OSError) and (found_cause := _explain_system(cause, tls)):
            return AWAY, *found_cause
    if isinstance(error, redis.ConnectionError):
        return AWAY, _n("It closed the connection") if tls else _TLS_PORT, ""
    return AWAY, _n("The client failed"), type(error).__name__


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _explain_system(error: OSError, tls: bool) -> tuple[str, str] | None:
    """Return text and detail for an error of the system or of TLS; None if the caller knows better."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _n("Its certificate is refused"), error.verify_message
    if isinstance(error, ssl.SSLError):
        reason = error.reason or type(error).__name__
        return (_NO_TLS, "") if reason.startswith(_NO_TLS_REASONS) else (_n("TLS fails"), reason)
    if isinstance(error, socket.gaierror):
        return _n("There is no such host"), ""
    if isinstance(error, ConnectionRefusedError):
        return _n("The connection is refused: no server listens at this address"), ""
    if isinstance(error, FileNotFoundError):
        return _n("A file that the address names isn't there"), ""
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return (_n("It closed the connection") if tls else _TLS_PORT), ""
    return (_n("The connection fails"), os.strerror(error.errno)) if error.errno else None
