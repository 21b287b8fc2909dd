"""What is done from a shell leaves a row in the audit log, as what operators do in the console."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sqlalchemy.orm import Session

from aijobs.errors import ApiError
from aijobs.ids import new_id
from aijobs.web.models import AuditLog
from aijobs.wiring import Services


def shell_user() -> str:
    """Who acts, for history and audit log: the account of the shell."""
    try:
        return f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:  # A container may run under a number that has no name.
        return f"cli:{os.getuid()}"


@contextmanager
def audited(
    services: Services, action: str, target_type: str, target_id: str, before: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Do an action inside, its row committed before it begins; put what came of it into the dictionary given."""
    entry_id, after = new_id(), dict[str, Any]()
    row = {
        "id": entry_id,
        "actor": shell_user(),
        "action": action,
        "target_type": target_type,
        "target_id": target_id,
        "before": dict(before),
        "at": services.clock.now(),
    }
    services.database.write(
        lambda session: session.add(AuditLog(**row)), settle=lambda session: session.get(AuditLog, entry_id)
    )
    try:
        yield after
    except ApiError as refusal:
        after["refused"] = refusal.code
        raise
    finally:

        def complete(session: Session) -> None:
            session.get_one(AuditLog, entry_id).after = after

        services.database.write(complete)
