"""The request log: each call, its answer, and whether the client left."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from aijobs.clock import Stopwatch, iso, utc_now
from aijobs.testing.fakellm.request import CHAT, Request


@dataclass(eq=False)
class Call:
    """One request and its answer. Durations are seconds after its receipt, by a monotonic clock.

    `usage` is counted even if the client didn't read the answer, because a provider bills it.
    """

    number: int
    request: Request
    received_at: datetime
    step: str = ""
    """The name of the step that answered."""
    status: int | None = None
    """The HTTP status that was sent; None if the connection ended before."""
    usage: dict[str, Any] | None = None
    whole: bool = False
    """Whether the whole answer was sent, before either side ended the connection."""
    left_after_s: float | None = None
    """When the client had left before the end of its answer; None if it stayed."""
    ended_after_s: float | None = None
    """When the answer ended, in any way; None while it goes on."""
    watch: Stopwatch = field(default_factory=Stopwatch, repr=False)

    @property
    def key(self) -> str:
        """The whole API key, for comparisons. It is in no repr and no listing."""
        return self.request.key

    @property
    def model(self) -> str:
        return self.request.model

    @property
    def body(self) -> Any:
        return self.request.body

    @property
    def headers(self) -> Any:
        """Headers by lower-case name."""
        return self.request.headers

    @property
    def stream(self) -> bool:
        return self.request.stream

    @property
    def client_left(self) -> bool:
        return self.left_after_s is not None

    @property
    def ended(self) -> bool:
        return self.ended_after_s is not None


class Ledger:
    """All calls since the start or the last `clear`, in order of receipt. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: list[Call] = []
        self._number = 0

    def open(self, request: Request) -> Call:
        """Record a call."""
        with self._changed:
            self._number += 1
            call = Call(self._number, request, utc_now())
            self._calls.append(call)
            self._changed.notify_all()
            return call

    def note(self, call: Call, **what: Any) -> None:
        """Set fields of a call, and wake those who wait."""
        with self._changed:
            for name, value in what.items():
                setattr(call, name, value)
            self._changed.notify_all()

    def calls(self, kind: str | None = CHAT) -> list[Call]:
        """The calls of a kind, or all of them."""
        with self._changed:
            return [call for call in self._calls if kind in (None, call.request.kind)]

    def clear(self) -> None:
        """Remove all calls, and begin with number 1 again."""
        with self._changed:
            self._calls.clear()
            self._number = 0

    def wait(self, until: Callable[[list[Call]], bool], deadline_s: float, what: str) -> list[Call]:
        """Return the chat calls once `until` is true for them. `AssertionError` with the log after the deadline."""
        with self._changed:
            reached = self._changed.wait_for(lambda: until(self.calls()), deadline_s)
        if not reached:
            raise AssertionError(f"not within {deadline_s:g} s: {what}; the log: {listing(self.calls())}")
        return self.calls()


def listing(calls: Sequence[Call], *, bodies: bool = False) -> list[dict[str, Any]]:
    """Return the calls as JSON, with only the last four characters of each key."""
    return [_row(call, bodies) for call in calls]


def _row(call: Call, bodies: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "number": call.number,
        "kind": call.request.kind,
        "path": call.request.path,
        "key": short_key(call.key),
        "model": call.model,
        "stream": call.stream,
        "receivedAt": iso(call.received_at),
        "step": call.step,
        "status": call.status,
        "usage": call.usage,
        "leftAfterS": call.left_after_s,
        "endedAfterS": call.ended_after_s,
    }
    if bodies:
        row["body"] = call.body
    if len(call.key) <= _SHOWN:
        return row
    shown: dict[str, Any] = json.loads(json.dumps(row).replace(json.dumps(call.key)[1:-1], short_key(call.key)))
    return shown


_SHOWN = 4


def short_key(key: str) -> str:
    """Return `…` and the last four characters, if these are a small part of the key."""
    if not key:
        return ""
    return f"…{key[-_SHOWN:]}" if len(key) >= 3 * _SHOWN else "…"
