"""Connections to the broker: short timeouts, no silent second tries, and what counts as trouble with it."""

from __future__ import annotations

from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from aijobs.errors import BrokerUnavailable, SettingsError
from aijobs.forks import leave_behind, renew_in_child

CONNECT_TIMEOUT_S = 0.5
SOCKET_TIMEOUT_S = 1.5
"""Above `READ_TIMEOUT_S`, so that an empty queue isn't taken for a frozen broker."""
READ_TIMEOUT_S = 1
"""How long a worker's blocking pop waits at the broker."""
HINT_TIMEOUT_S = 0.2
"""For what is only a courtesy and mustn't hold up whoever asks."""

ACL_RULES = (
    "resetkeys ~huey.redis.aijobs_* ~worker:heartbeat:* ~job:cancel:* ~aijobs:* "
    "resetchannels -@all +bzpopmin +zadd +zmscore +zrem +zcard +zrange "
    "+set +get +mget +del +pttl +scan +ping +info +select +time +watch +unwatch +multi +exec"
)
"""What a Redis user of ours needs and all it needs: `ACL SETUSER aijobs on >PASSWORD` and these rules."""


def connect(url: str, *, timeout_s: float = SOCKET_TIMEOUT_S) -> redis.Redis:
    """A client with a pool of its own, for one process (a fork gets fresh connections); nothing is opened
    yet.

    `timeout_s` bounds each answer, and the opening of a connection where it is below `CONNECT_TIMEOUT_S`. A
    command is sent once: whether one that timed out arrived is for the caller to find out. RESP2 and no
    client info, so that nothing but our own commands (and AUTH) is sent. `SettingsError` for an address
    that can't be read.
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
    except ValueError:
        scheme = urlsplit(url).scheme or "no scheme"
        raise SettingsError(
            f"AIJOBS_REDIS_URL can't be read ({scheme}): write redis://, rediss:// or unix://"
        ) from None
    client = redis.Redis(connection_pool=pool)
    renew_in_child(client, _empty_pool)
    return client


def _empty_pool(client: redis.Redis) -> None:
    """Give the child of a fork a pool of its own.

    redis-py drops inherited connections itself, but may wait for a lock that a thread of the parent held.
    """
    inherited = client.connection_pool
    leave_behind(inherited)
    client.connection_pool = redis.ConnectionPool(inherited.connection_class, **inherited.connection_kwargs)


def unavailable(client: redis.Redis, error: redis.RedisError) -> BrokerUnavailable:
    """What any error from the broker means for its caller.

    No answer of the broker is the message's fault: refused, timed out, read-only after a failover, full,
    loading, a user without rights, a key of the wrong kind; all of them are mended at the broker, and then
    the same message goes through. Idle connections are dropped, so that the next try meets whoever the
    address means by then.
    """
    client.connection_pool.disconnect(inuse_connections=False)
    return BrokerUnavailable(f"broker: {type(error).__name__}")
