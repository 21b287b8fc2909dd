"""The audit log page: who did what to what, why, with what result, when and from where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from flask import make_response, request
from flask.typing import ResponseReturnValue
from sqlalchemy import select
from sqlalchemy.orm import Session

from aijobs.canonical import identifier_fault
from aijobs.errors import InputInvalid
from aijobs.monitor.keyset import Cursors, Keyset, Page
from aijobs.operators import rights
from aijobs.operators.audit import TARGET_TYPES
from aijobs.operators.models import AuditLog
from aijobs.web.console.pages import render, whole_page
from aijobs.web.context import services

PER_PAGE = 50
_ORDER = Keyset("audit", (AuditLog.at, AuditLog.id))


@dataclass(frozen=True)
class AuditRow:
    """One action of the audit log."""

    at: datetime
    actor: str
    action: str
    target_type: str
    target_id: str
    reason: str | None
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    remote_addr: str | None
    user_agent: str | None


_COLUMNS = tuple(getattr(AuditLog, name) for name in AuditRow.__dataclass_fields__)


@whole_page("/audit", rights.AUDIT)
def audit() -> ResponseReturnValue:
    """The actions of operators, newest first, one page at a time; of one target if it is named."""
    try:
        target = _read_target()
        with services().database.read() as session:
            page = _find_page(session, target, request.args.get("cursor"))
        status = 200
    except InputInvalid:
        target, page, status = None, Page[AuditRow]((), None), 422
    body = render("console/audit/index.html", "console/audit/_list.html", page=page, target=target, fault=status != 200)
    return make_response(body, status)


def _read_target() -> str | None:
    """Return the target of the URL; `InputInvalid` for a text that can't be an id."""
    target = request.args.get("target")
    fault = None if target is None else identifier_fault(target)
    if fault:
        raise InputInvalid([("target", fault)])
    return target


def _find_page(session: Session, target: str | None, cursor: str | None) -> Page[AuditRow]:
    cursors = Cursors(services().settings.secret_key)
    query = select(AuditLog.id, *_COLUMNS)
    if target is not None:
        query = query.where(AuditLog.target_type.in_(TARGET_TYPES), AuditLog.target_id == target)
    found = session.execute(_ORDER.page(query, cursor, PER_PAGE, cursors)).all()
    shown = found[:PER_PAGE]
    behind = _ORDER.cursor((shown[-1].at, shown[-1].id), cursors) if len(found) > PER_PAGE else None
    return Page(tuple(AuditRow(*row[1:]) for row in shown), behind)
