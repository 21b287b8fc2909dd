"""Blueprints of plug-ins need a user's token; an unusable one is refused at the start."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
from flask import Blueprint

from aijobs.definitions.errors import DefinitionError
from aijobs.errors import ApiError
from aijobs.web import plugins
from aijobs.web.factory import create_app
from aijobs.web.user_tokens import get_user_id
from aijobs.wiring.services import Services
from tests.web.api.conftest import as_user


def build_blueprint(name: str = "plugged", address: str = "/api/learning/plugged") -> Blueprint:
    blueprint = Blueprint(name, __name__)

    @blueprint.before_request
    def note() -> None:
        reached.append(name)

    @blueprint.get(address)
    def show() -> dict[str, str]:
        return {"user": get_user_id()}

    @blueprint.post(address)
    def refuse() -> None:
        raise ApiError("JOB_NOT_FOUND")

    return blueprint


reached: list[str] = []
"""Names of the blueprints whose code ran."""
GOOD = build_blueprint()
TAKEN = build_blueprint(address="/api/learning/flashcards")
OUTSIDE = build_blueprint(address="/console/plugged")
NAME = build_blueprint(name="user_api")
NOTHING = "no blueprint"


def install(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    points = [EntryPoint(f"point{n}", value, plugins.ENTRY_POINT_GROUP) for n, value in enumerate(values)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point for point in points if point.group == group])


def test_route_of_a_plug_in_requires_a_user_token(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, f"{__name__}:GOOD")
    for _ in range(2):  # Two applications in one process share the blueprint.
        reached.clear()
        client = create_app(services=services).test_client()
        refused = client.get("/api/learning/plugged")
        assert (refused.status_code, refused.json["error"]["code"]) == (401, "UNAUTHORIZED")
        assert reached == []
        assert client.get("/api/learning/plugged", headers=as_user("ada")).json == {"user": "ada"}
        missing = client.post("/api/learning/plugged", headers=as_user())
        assert (missing.status_code, missing.json["error"]["code"]) == (404, "JOB_NOT_FOUND")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (f"{__name__}:TAKEN", "/api/learning/flashcards is already in use"),
        (f"{__name__}:OUTSIDE", "/console/plugged isn't below /api/"),
        (f"{__name__}:NAME", "user_api"),
        (f"{__name__}:NOTHING", "it isn't a flask.Blueprint"),
        (f"{__name__}:MISSING", "MISSING"),
        ("no_such_package.routes:blueprint", "No module named 'no_such_package'"),
    ],
)
def test_unusable_blueprint_is_named(services: Services, monkeypatch: pytest.MonkeyPatch, value: str, why: str) -> None:
    install(monkeypatch, value)
    with pytest.raises(DefinitionError) as refused:
        create_app(services=services)
    message = str(refused.value)
    assert message.startswith(f"the blueprint 'point0' ({value}) can't be added: ")
    assert why in message
    assert "\n" not in message
