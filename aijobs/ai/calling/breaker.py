"""The circuit breaker: a provider that fails isn't called for a while; then one call tries it before all others.

Each scope (a provider and whose key is used) has one breaker, which all processes share. Closed: calls go through.
Open: no call does until its time is over. Half-open: one call, the probe, goes through under a lease, and its result
decides for all.

```
closed --failures in a row, or an exhausted account--> open --its time is over--> half_open --the probe failed--> open
   ^------------------------------------------------------------ the probe, or any other call, succeeded --'
```
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, NamedTuple, Protocol

from pydantic import Field, TypeAdapter

from aijobs.answers import Answer, Maybe, Natural, Span, Time, one_of
from aijobs.errors import BrokerUnavailable
from aijobs.ids import new_id
from aijobs.logs import Outage, Sparing, get_logger
from aijobs.reading import read_json, warn_unreadable

WINDOW = timedelta(seconds=60)
"""Failures in a row count if they lie within this time."""
LONGEST = 10
"""Maximum open time, as a multiple of the first. An exhausted account opens for this long at once."""
KEPT = timedelta(hours=1)
"""How long a breaker whose time is over is kept if nobody asks it. Then it counts as closed."""
PROBE_LEASE = timedelta(seconds=20)
"""After this time another probe may go: the first may have died with its worker. A long answer then runs beside a
second probe, which is harmless.
"""
PROBE_WAIT = timedelta(seconds=5)
"""The wait while another call is the probe."""
FURTHEST = timedelta(days=1)
"""A time further in the future isn't ours, unless the settings allow longer open times."""
JITTER = 0.2
"""Maximum part of a wait that is added to it, so that callers don't return all at once."""
TRIES = 20
"""Maximum tries of a change when other processes change the same breaker."""

logger = get_logger(__name__)


class CircuitState(StrEnum):
    """The states of a breaker. It is `unknown` while the store is away."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    UNKNOWN = "unknown"


class BreakerContended(BrokerUnavailable):
    """Other processes changed the breaker at each of our tries."""


class BreakerStore(Protocol):
    """One text per scope, shared by all processes, and the clock that all of them use."""

    def read(self, scopes: Sequence[str]) -> tuple[int, list[str | None]]:
        """Return milliseconds by the store's clock, and the text of each scope or None. `BrokerUnavailable`."""
        ...

    def swap(self, scope: str, seen: str | None, new: str | None, keep: timedelta) -> bool:
        """Write `new` (None: delete) if the text is still `seen`, with an expiry of `keep`. Return whether it was.

        `BrokerUnavailable`.
        """
        ...


def scope_of(provider: str, credential_id: str | None = None) -> str:
    """Return the scope of a call: the platform's at that provider, or that of one user's credential."""
    return f"{provider}.platform" if credential_id is None else f"{provider}.cred-{credential_id}"


@dataclass(frozen=True)
class BreakerState(Answer):
    """The state of a breaker for people."""

    schema_name = "Breaker"

    scope: str
    word: Annotated[str, one_of(CircuitState), Field(serialization_alias="state")]
    """`unknown` while the store is away. Calls then go through as if it were closed."""
    failures: Natural = 0
    """Failures in a row, until now or until it opened."""
    opened: Natural = 0
    """Number of times it opened since it was last closed."""
    open_for: Annotated[Maybe[Span], Field(serialization_alias="openForMs")] = None
    """Remaining open time."""
    since: Maybe[Time] = None
    """Time of the last change to closed, by the store's clock."""
    why: Maybe[str] = None
    """The error code of the failure that opened it."""
    probing: bool = False
    """Whether a probe is running."""


_Instant = Annotated[int, Field(ge=0, le=253_402_300_799_999)]
"""Milliseconds since 1970, up to the end of year 9999."""
_Word = Annotated[str, Field(max_length=100)]


@dataclass(frozen=True)
class _Record:
    """The stored state of a scope, with times in milliseconds by the store's clock. The default is a closed breaker."""

    failed_at: Annotated[tuple[_Instant, ...], Field(max_length=1000)] = ()
    opened: Annotated[int, Field(ge=0, le=10**9)] = 0
    since: _Instant = 0
    until: _Instant = 0
    why: _Word = ""
    probe: _Word = ""
    probe_until: _Instant = 0

    def word(self, now: int) -> str:
        if not self.opened:
            return CircuitState.CLOSED
        return CircuitState.OPEN if now < self.until else CircuitState.HALF_OPEN

    def probing(self, now: int) -> bool:
        return self.word(now) == CircuitState.HALF_OPEN and now < self.probe_until

    def write(self) -> str | None:
        return None if self == _CLEAR else json.dumps(asdict(self), separators=(",", ":"))

    @property
    def last_instant(self) -> int:
        return max(self.since, self.until, self.probe_until, *self.failed_at)


_CLEAR = _Record()
_SHAPE = TypeAdapter(_Record)
_Rule = Callable[[_Record, int], _Record]
"""Returns the new record from the old one and the store's time."""


class _Change(NamedTuple):
    now: int
    old: _Record
    new: _Record


class CircuitBreaker:
    """The breakers of all scopes. Thread-safe. While the store is away each counts as closed.

    A caller that was admitted reports the end of its call from the same thread: `succeeded`, `failed` or `given_back`.
    """

    def __init__(
        self,
        store: BreakerStore,
        failures: int,
        open_s: float,
        *,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Open after `failures` in a row for `open_s` seconds, and each next time twice as long, up to ten times as
        long. `chance` returns a number from 0 to 1.
        """
        self._store, self._failures, self._chance = store, failures, chance
        self._open_ms = round(open_s * 1000)
        self._longest_ms = self._open_ms * LONGEST
        self._mine = threading.local()
        self._outage = Outage(logger, "breaker.store")
        self._contended = Sparing()

    # --- around a call -----------------------------------------------------------------------------------------

    def admit(self, scope: str, lease: timedelta = PROBE_LEASE) -> timedelta | None:
        """Return None if the call may go, otherwise how long until a call is worth trying.

        While it is half-open one caller is admitted, as the probe; after `lease` without a report, another is.
        """
        self._tokens.pop(scope, None)
        token = new_id()

        def take(record: _Record, now: int) -> _Record:
            if record.word(now) != CircuitState.HALF_OPEN or record.probing(now):
                return record
            return replace(record, probe=token, probe_until=now + _ms(lease))

        change = self._change(scope, take)
        if change is None:
            return None
        if change.new.probe == token:
            self._tokens[scope] = token
            return None
        return self._wait(change.new, change.now)

    def is_probing(self, scope: str) -> bool:
        """Return whether this thread's call is the probe, and hasn't ended yet."""
        return scope in self._tokens

    def succeeded(self, scope: str) -> None:
        """Record a success. Closes the breaker, unless it is open: then the call began before that."""
        self._tokens.pop(scope, None)
        change = self._change(scope, lambda record, now: record if record.word(now) == CircuitState.OPEN else _CLEAR)
        if change and change.old.opened and not change.new.opened:
            logger.info("breaker.closed", scope=scope, why=change.old.why)

    def failed(self, scope: str, *, exhausted: bool = False, code: str = "") -> None:
        """Record a failure with its code. `exhausted`: the account is empty, which opens the breaker at once.

        A failure that arrives while it is open belongs to an earlier call, and changes nothing.
        """
        self._tokens.pop(scope, None)
        code = code or ("PROVIDER_ACCOUNT_EXHAUSTED" if exhausted else "PROVIDER_UNAVAILABLE")
        change = self._change(scope, lambda record, now: self._after_failure(record, now, exhausted, code))
        if change and change.new.opened > change.old.opened:
            lasts, opened = change.new.until - change.now, change.new.opened
            logger.warning("breaker.opened", scope=scope, why=code, openMs=lasts, opened=opened)

    def given_back(self, scope: str) -> None:
        """Record a call that says nothing about the provider: it was cancelled, or the user's own fault.

        If it was the probe, the next caller makes another.
        """
        token = self._tokens.pop(scope, None)
        if token is not None:
            self._change(scope, lambda record, _: _without_probe(record) if record.probe == token else record)

    # --- looking on --------------------------------------------------------------------------------------------

    def blocked_for(self, scope: str) -> timedelta | None:
        """Return what `admit` would, without taking the probe: None while closed, or while a probe may go."""
        change = self._change(scope, lambda record, _: record)
        return self._wait(change.new, change.now) if change else None

    def states(self, scopes: Sequence[str]) -> list[BreakerState]:
        """Return the state of each scope, in the same order."""
        if not scopes:
            return []
        try:
            now, texts = self._store.read(scopes)
        except BrokerUnavailable as error:
            self._outage.failed(error)
            return [BreakerState(scope, CircuitState.UNKNOWN) for scope in scopes]
        self._outage.worked()
        return [self._state(scope, self._read(text, now), now) for scope, text in zip(scopes, texts, strict=True)]

    def reset(self, scope: str) -> BreakerState:
        """Close a breaker, and return its state before.

        `BrokerUnavailable`, and `BreakerContended` if other processes change it all the time: then it may be unchanged.
        """
        for _ in range(TRIES):
            now, (text,) = self._store.read([scope])
            if text is None or self._store.swap(scope, text, None, KEPT):
                return self._state(scope, self._read(text, now), now)
        raise BreakerContended(f"breaker {scope}: changed by others all the time, try again")

    # --- the rule ----------------------------------------------------------------------------------------------

    def _after_failure(self, record: _Record, now: int, exhausted: bool, code: str) -> _Record:
        word = record.word(now)
        recent = (
            [at for at in record.failed_at if now - at < _ms(WINDOW)]
            if word == CircuitState.CLOSED
            else record.failed_at
        )
        failed_at = (*recent, now)[-self._failures :]
        if word == CircuitState.OPEN:
            until = now + self._longest_ms
            return replace(record, until=max(record.until, until), why=code) if exhausted else record
        if word == CircuitState.CLOSED and not exhausted and len(failed_at) < self._failures:
            return replace(record, failed_at=failed_at)
        opened = record.opened + 1
        lasts = self._longest_ms if exhausted else min(self._open_ms * 2 ** min(opened - 1, LONGEST), self._longest_ms)
        return _Record(failed_at, opened, record.since or now, now + lasts, code)

    def _wait(self, record: _Record, now: int) -> timedelta | None:
        if record.word(now) == CircuitState.OPEN:
            return self._spread(record.until - now)
        if record.probing(now):
            return self._spread(min(record.probe_until - now, _ms(PROBE_WAIT)))
        return None

    def _spread(self, wait_ms: int) -> timedelta:
        return timedelta(milliseconds=round(wait_ms * (1 + JITTER * self._chance())))

    def _state(self, scope: str, record: _Record, now: int) -> BreakerState:
        word = record.word(now)
        return BreakerState(
            scope=scope,
            word=word,
            failures=len([at for at in record.failed_at if record.opened or now - at < _ms(WINDOW)]),
            opened=record.opened,
            open_for=timedelta(milliseconds=record.until - now) if word == CircuitState.OPEN else None,
            since=datetime.fromtimestamp(record.since / 1000, UTC) if record.opened else None,
            why=record.why or None,
            probing=record.probing(now),
        )

    # --- the store ---------------------------------------------------------------------------------------------

    def _read(self, text: str | None, now: int) -> _Record:
        """Return the record of a text. A text that isn't ours counts as closed: one call too many is better."""
        record = read_json("breaker", text, _SHAPE) if text else _CLEAR
        if record is None:
            return _CLEAR
        if record.last_instant > now + max(self._longest_ms, _ms(FURTHEST)):
            warn_unreadable("breaker")
            return _CLEAR
        return record

    @property
    def _tokens(self) -> dict[str, str]:
        """The probes of this thread, by scope."""
        tokens: dict[str, str] = self._mine.__dict__.setdefault("tokens", {})
        return tokens

    def _change(self, scope: str, rule: _Rule) -> _Change | None:
        """Apply `rule` to a scope's record atomically; None while the store is away.

        If other processes change the same record all the time, theirs stays, and a line is logged.
        """
        try:
            for _ in range(TRIES):
                now, (text,) = self._store.read([scope])
                old = self._read(text, now)
                new = rule(old, now)
                if new == old or self._store.swap(scope, text, new.write(), _kept(new, now)):
                    break
            else:
                new = old
                if (held_back := self._contended.may_say(scope)) is not None:
                    logger.warning("breaker.contended", scope=scope, alsoContended=held_back)
        except BrokerUnavailable as error:
            self._outage.failed(error)
            return None
        self._outage.worked()
        return _Change(now, old, new)


def _without_probe(record: _Record) -> _Record:
    return replace(record, probe="", probe_until=0)


def _kept(record: _Record, now: int) -> timedelta:
    return timedelta(milliseconds=max(0, record.until - now)) + (KEPT if record.opened else WINDOW)


def _ms(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1000)
