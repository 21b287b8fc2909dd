"""Every operator action leaves a row: who did what to what, why, before and after, when and from where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flask import request
from sqlalchemy.orm import Session

from aijobs.errors import ApiError
from aijobs.ids import new_id
from aijobs.web.auth import OperatorUser
from aijobs.web.context import client_address, printable, services
from aijobs.web.models import AuditLog


class AuditEntry:
    """The row of an action that goes on; set `after` to what came of it."""

    def __init__(self, entry_id: str) -> None:
        self.id = entry_id
        self.after: Mapping[str, Any] | None = None


@contextmanager
def audited(
    operator: OperatorUser,
    action: str,
    target_type: str,
    target_id: str,
    *,
    reason: str | None = None,
    before: Mapping[str, Any] | None = None,
) -> Iterator[AuditEntry]:
    """Do an action inside: its row is committed before it begins, so that none is without one.

    What came of it is added at the end: the entry's `after`, or the code with which it was refused.
    """
    entry = AuditEntry(new_id())
    row = {
        "id": entry.id,
        "operator_id": operator.id,
        "actor": operator.actor,
        "action": action,
        "target_type": target_type,
        "target_id": target_id,
        "reason": reason,
        "before": dict(before) if before is not None else None,
        "remote_addr": client_address(),
        "user_agent": printable(request.headers.get("User-Agent", ""), 300),
        "at": services().clock.now(),
    }
    services().database.write(lambda session: session.add(AuditLog(**row)), settle=_is_there(entry.id))
    try:
        yield entry
    except ApiError as error:
        entry.after = {"refused": error.code}
        raise
    except Exception as error:
        entry.after = {"failed": type(error).__name__}
        raise
    finally:
        _complete(entry)


def _complete(entry: AuditEntry) -> None:
    if entry.after is None:
        return
    after = dict(entry.after)

    def work(session: Session) -> None:
        row = session.get(AuditLog, entry.id)
        if row is not None:
            row.after = after

    services().database.write(work)


def _is_there(entry_id: str) -> Any:
    def settle(session: Session) -> bool | None:
        return True if session.get(AuditLog, entry_id) is not None else None

    return settle
