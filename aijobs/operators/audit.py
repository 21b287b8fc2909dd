"""Write the audit log: who did what to what, why, before and after, when and from where. Knows no Flask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from aijobs.db.clock import Clock
from aijobs.db.database import Database
from aijobs.errors import ApiError
from aijobs.ids import new_id
from aijobs.operators.models import AuditLog

LONGEST_REASON = 1000

JOB = "job"
OUTBOX_EVENT = "outbox_event"
LOGIN = "login"
OPERATOR = "operator"
CREDENTIAL = "credential"
PROVIDER = "provider"
TARGET_TYPES = (JOB, OUTBOX_EVENT, LOGIN, OPERATOR, CREDENTIAL, PROVIDER)


@dataclass(frozen=True)
class Actor:
    """The actor of an action. Its `name` also stands in the history: `operator:{username}`, `cli:{account}` or
    `service`.
    """

    name: str
    operator_id: str | None = None
    remote_addr: str | None = None
    user_agent: str | None = None


class AuditEntry:
    """The row of a running action. Set `after` to its result."""

    def __init__(self, entry_id: str) -> None:
        self.id = entry_id
        self.after: Mapping[str, Any] | None = None


class AuditTrail:
    """Writes the rows of one actor."""

    def __init__(self, database: Database, clock: Clock, actor: Actor) -> None:
        self._database, self._clock, self._actor = database, clock, actor

    def row(self, action: str, target_type: str, target_id: str, **columns: Any) -> AuditLog:
        """Return a row for the caller's transaction. `columns`: further values of the row, such as `reason`."""
        return AuditLog(
            actor=self._actor.name,
            operator_id=self._actor.operator_id,
            remote_addr=self._actor.remote_addr,
            user_agent=self._actor.user_agent,
            action=action,
            target_type=target_type,
            target_id=target_id,
            at=self._clock.now(),
            **columns,
        )

    @contextmanager
    def entry(
        self, action: str, target_type: str, target_id: str, *, reason: str | None, before: Mapping[str, Any]
    ) -> Iterator[AuditEntry]:
        """Run an action in the block. Its row is committed before, so that no action is without one.

        The result is added at the end: the entry's `after`, or the code of its refusal.
        """
        entry = AuditEntry(new_id())

        def begin(session: Session) -> None:
            session.add(self.row(action, target_type, target_id, id=entry.id, reason=reason, before=dict(before)))

        self._database.write(begin, confirm=_is_there(entry.id))
        try:
            yield entry
        except ApiError as error:
            entry.after = {"refused": error.code}
            raise
        except Exception as error:
            entry.after = {"failed": type(error).__name__}
            raise
        finally:
            self._complete(entry)

    def _complete(self, entry: AuditEntry) -> None:
        if entry.after is None:
            return
        after = dict(entry.after)

        def work(session: Session) -> None:
            row = session.get(AuditLog, entry.id)
            if row is not None:
                row.after = after

        self._database.write(work)


def _is_there(entry_id: str) -> Callable[[Session], bool | None]:
    def confirm(session: Session) -> bool | None:
        return True if session.get(AuditLog, entry_id) is not None else None

    return confirm
