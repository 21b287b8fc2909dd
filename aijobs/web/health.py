"""Whether the process lives, and whether it can work."""

from __future__ import annotations

from flask import Blueprint, Response, jsonify
from sqlalchemy.exc import SQLAlchemyError

from aijobs.errors import BrokerUnavailable, SettingsError
from aijobs.schema import check_schema
from aijobs.web.context import services

health = Blueprint("health", __name__)


@health.get("/healthz")
def healthz() -> Response:
    """200 as long as the process answers."""
    return jsonify({"status": "ok"})


@health.get("/readyz")
def readyz() -> tuple[Response, int]:
    """200 if the database answers and has our schema. The broker may be away: jobs are kept until it is back."""
    try:
        check_schema(services().database.engine)
        database, schema = "ok", "ok"
    except SettingsError:
        database, schema = "ok", "wrong"
    except SQLAlchemyError:
        database, schema = "away", "unknown"
    ready = schema == "ok"
    body = {
        "status": "ready" if ready else "not_ready",
        "database": database,
        "schema": schema,
        "broker": _broker(),
    }
    return jsonify(body), 200 if ready else 503


def _broker() -> str:
    try:
        services().broker.ping()
    except BrokerUnavailable:
        return "away"
    return "ok"
