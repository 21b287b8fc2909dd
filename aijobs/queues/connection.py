"""Connections to the broker: short timeouts, no silent repeats, and what counts as an outage."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from aijobs.errors import BrokerUnavailable, SettingsError
from aijobs.forks import leave_behind, renew_in_child
from aijobs.queues.state import AWAY
from aijobs.queues.trouble import explain

T = TypeVar("T")

CONNECT_TIMEOUT_S = 0.5
SOCKET_TIMEOUT_S = 1.5
"""Above `READ_TIMEOUT_S`, so that an empty queue isn't taken for a frozen broker."""
READ_TIMEOUT_S = 1
"""How long a worker's blocking pop waits at the broker."""
HINT_TIMEOUT_S = 0.2
"""For hints, which must delay nobody."""

ACL_RULES = (
    "resetkeys ~huey.redis.aijobs_* ~worker:heartbeat:* ~job:cancel:* ~aijobs:* "
    "resetchannels -@all +bzpopmin +zadd +zmscore +zrem +zcard +zrange "
    "+set +get +mget +del +pttl +scan +ping +info +select +time +watch +unwatch +multi +exec"
)
"""All rules that our Redis user needs: `ACL SETUSER aijobs on >PASSWORD` and these."""


SHORT_TIMEOUT_S = 0.5
"""For pages, breakers and call slots."""
PAUSE_S = 3.0
"""How long an `ImpatientClient` asks nothing after the broker didn't answer."""
_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")


def connect(url: str, *, timeout_s: float = SOCKET_TIMEOUT_S) -> redis.Redis:
    """Return a client with a pool of its own, for one process (a fork gets new connections). It connects later.

    `timeout_s` limits each answer, and the opening of a connection if it is below `CONNECT_TIMEOUT_S`. A command is
    sent once: the caller has to find out whether one that timed out arrived. RESP2 and no client info, so that only our
    own commands and AUTH are sent. `SettingsError` for a URL that can't be read.
    """
    try:
        pool = redis.ConnectionPool.from_url(
            url,
            socket_connect_timeout=min(timeout_s, CONNECT_TIMEOUT_S),
            socket_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            driver_info=None,
            decode_responses=False,
        )
        pool.connection_class(**pool.connection_kwargs)  # Refuses unknown options, and connects to nothing.
    except (ValueError, TypeError, redis.RedisError) as error:
        raise SettingsError(f"AIJOBS_REDIS_URL can't be read: {_why_unreadable(url, error)}") from None
    for name in _FILES:
        path = pool.connection_kwargs.get(name)
        if path and not Path(path).exists():
            raise SettingsError(f"AIJOBS_REDIS_URL: {name} names {path}, which isn't there")
    client = redis.Redis(connection_pool=pool)
    renew_in_child(client, _empty_pool)
    return client


def _why_unreadable(url: str, error: Exception) -> str:
    """Return one line without the URL, which may hold a password."""
    scheme = urlsplit(url).scheme
    if "sentinel" in scheme:
        return "Sentinel isn't supported; write the address of the Redis server that it watches"
    if "cluster" in scheme:
        return "a Redis cluster isn't supported; write the address of one Redis server"
    if scheme not in ("redis", "rediss", "unix"):
        return f"write redis://, rediss:// or unix:// (not {scheme or 'no scheme'})"
    if "," in urlsplit(url).netloc.rpartition("@")[2]:
        return "it names several servers; write the address of one"
    option = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if option is None:
        return "a port, database or option in it has no value that fits"
    needs_tls = option[1].startswith("ssl_") and scheme == "redis"
    return f"{option[1]} needs rediss://" if needs_tls else f"{option[1]} is no option"


def _empty_pool(client: redis.Redis) -> None:
    """Give the child of a fork a pool of its own.

    redis-py drops inherited connections itself, but may wait for a lock that a thread of the parent held.
    """
    inherited = client.connection_pool
    leave_behind(inherited)
    client.connection_pool = redis.ConnectionPool(inherited.connection_class, **inherited.connection_kwargs)


def unavailable(client: redis.Redis, error: redis.RedisError) -> BrokerUnavailable:
    """Return the `BrokerUnavailable` for any error of the broker.

    The message is never at fault: refused, timed out, read-only after a failover, full, loading, a user without rights,
    a key of the wrong type. All are mended at the broker, and then the same message goes through. Idle connections are
    dropped, so that the next try reaches the current server behind the URL.
    """
    pool = client.connection_pool
    pool.disconnect(inuse_connections=False)
    return explain(error, tls=issubclass(pool.connection_class, redis.SSLConnection))


class ImpatientClient:
    """Asks the broker with a short timeout. If it doesn't answer, asks nothing for some seconds. Thread-safe.

    For pages and provider calls: they wait once for a frozen broker, and not once for each question.
    """

    def __init__(self, client: redis.Redis, pause_s: float = PAUSE_S) -> None:
        self._client, self._pause_s = client, pause_s
        self._again_at = 0.0
        self._last: BrokerUnavailable | None = None

    def ask(self, question: Callable[[redis.Redis], T]) -> T:
        """Return the answer of `question`. `BrokerUnavailable`, with the last cause during the pause."""
        if self._last is not None and time.monotonic() < self._again_at:
            raise BrokerUnavailable(str(self._last), self._last.state)
        try:
            return question(self._client)
        except redis.RedisError as error:
            trouble = unavailable(self._client, error)
            if trouble.state == AWAY:
                self._last, self._again_at = trouble, time.monotonic() + self._pause_s
            raise trouble from error
