"""Health checks: whether the process lives, and whether it can work."""

from __future__ import annotations

from flask import Blueprint, Response, jsonify
from sqlalchemy.exc import SQLAlchemyError

from aijobs.db.schema import check_schema
from aijobs.errors import SettingsError
from aijobs.queues.state import UNSUPPORTED
from aijobs.upkeep.pass_log import probe_writes
from aijobs.web.context import services

health = Blueprint("health", __name__)


@health.get("/healthz")
def healthz() -> Response:
    """Return 200 while the process answers."""
    return jsonify({"status": "ok"})


@health.get("/readyz")
def readyz() -> tuple[Response, int]:
    """Return 200 if the database answers, has our schema and takes writes, and the broker is usable.

    The broker may be away or take no writes, and passes may be late: jobs are kept meanwhile.
    """
    try:
        check_schema(services().database.engine)
        database, schema = "ok", "ok"
    except SettingsError:
        database, schema = "ok", "wrong"
    except SQLAlchemyError:
        database, schema = "away", "unknown"
    if schema == "ok":
        database = services().database.write_fault(probe_writes(services().clock)) or "ok"
    broker = services().broker.probe()
    ready = (database, schema) == ("ok", "ok") and broker.state != UNSUPPORTED
    body = {
        "status": "ready" if ready else "not_ready",
        "database": database,
        "schema": schema,
        "broker": broker.state,
        **({"brokerCause": broker.cause} if broker.cause else {}),
        "passes": _passes() if schema == "ok" else "unknown",
    }
    return jsonify(body), 200 if ready else 503


def _passes() -> str:
    """Return the worst state of the passes."""
    try:
        states = {row.state for row in services().monitor.passes()}
    except SQLAlchemyError:
        return "unknown"
    return next((state for state in ("overdue", "failing") if state in states), "on_time")
