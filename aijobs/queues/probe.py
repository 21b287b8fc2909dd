"""Read whether the broker answers and takes our writes, in one round trip that changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import redis

from aijobs.errors import BrokerUnavailable, SettingsError
from aijobs.queues.connection import ImpatientClient
from aijobs.queues.presence import HEARTBEAT_PREFIX
from aijobs.queues.state import OK, REFUSED, TAKES_NO_WRITES, UNSUPPORTED, BrokerState, QueueState
from aijobs.queues.trouble import CLUSTER, SENTINEL, explain

_NOBODY = "nobody"
"""A key and member that never exist: with XX a write changes nothing then."""
_MODES = {"cluster": CLUSTER, "sentinel": SENTINEL}


def probe(client: ImpatientClient, queue_keys: Mapping[str, str]) -> BrokerState:
    """Return the state of the broker and of each queue, by the queue's name. Never raises.

    Try the writes that processes depend on, a message and a heartbeat: a full broker, a read-only replica or a user
    without rights answers a ping.
    """

    def ask(connected: redis.Redis) -> list[Any]:
        pipeline = connected.pipeline(transaction=False)
        pipeline.info("server")
        pipeline.set(HEARTBEAT_PREFIX + _NOBODY, b"", xx=True, ex=1)
        for key in queue_keys.values():
            pipeline.zadd(key, {_NOBODY: 0}, xx=True)
            pipeline.zcard(key)
        return list(pipeline.execute(raise_on_error=False))

    try:
        server, heartbeat, *answers = client.ask(ask)
    except BrokerUnavailable as error:
        return BrokerState(error.state, str(error))
    if (mode := find_unsupported_mode(server)) is not None:
        return BrokerState(UNSUPPORTED, mode)
    pairs = zip(answers[::2], answers[1::2], strict=True)
    queues = {name: _queue(*pair) for name, pair in zip(queue_keys, pairs, strict=True)}
    if isinstance(heartbeat, Exception):
        state, cause = _refusal(heartbeat)
        return BrokerState(state, cause, {name: replace(q, state=state, cause=cause) for name, q in queues.items()})
    refused = {name: queue for name, queue in queues.items() if queue.state != OK}
    if not refused:
        return BrokerState(OK, None, queues)
    name, first = next(iter(refused.items()))
    alone = len(refused) < len(queues)
    return BrokerState(first.state, f"{name}: {first.cause}" if alone else first.cause, queues)


def find_unsupported_mode(server: Any) -> str | None:
    """Return why a server can't be used, by its INFO; None if it can, or if it doesn't say."""
    if not isinstance(server, dict):
        return None
    return _MODES.get(str(server.get("redis_mode") or server.get("server_mode")))  # Redis, and Valkey.


def refuse_unsupported(client: redis.Redis) -> None:
    """Raise `SettingsError` for a cluster or a Sentinel. A server that doesn't answer, or doesn't say, passes."""
    try:
        mode = find_unsupported_mode(client.info("server"))
    except redis.RedisError:
        return
    if mode is not None:
        raise SettingsError(f"AIJOBS_REDIS_URL can't be used. {mode}")


def _queue(added: Any, depth: Any) -> QueueState:
    """Return a queue's state, from the answers to a message and to the number of messages."""
    for answer in (added, depth):
        if isinstance(answer, Exception):
            return QueueState(*_refusal(answer), depth=depth if isinstance(depth, int) else None)
    return QueueState(depth=int(depth))


def _refusal(error: Exception) -> tuple[str, str]:
    trouble = explain(error)
    return TAKES_NO_WRITES if trouble.state == REFUSED else trouble.state, str(trouble)
