"""Routes of installed plug-ins: Flask blueprints in the entry-point group `aijobs.blueprints`.

They are part of the user's API: below `/api/`, for the learning app's users, with errors as JSON.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from flask import Blueprint, Flask

from aijobs.definitions.errors import DefinitionError
from aijobs.web.user_tokens import get_user_id

ENTRY_POINT_GROUP = "aijobs.blueprints"
PREFIX = "/api/"


def init_app(app: Flask) -> None:
    """Add the blueprint of each plug-in. Without a valid user token all its routes answer `UNAUTHORIZED`.

    `DefinitionError` names the plug-in if its blueprint can't be loaded, its name or a path is taken, or a path isn't
    below `/api/`.
    """
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            _add(app, _load(point))
        except Exception as error:
            raise DefinitionError(f"the blueprint {point.name!r} ({point.value}) can't be added: {error}") from error


def _load(point: EntryPoint) -> Blueprint:
    blueprint = point.load()
    if not isinstance(blueprint, Blueprint):
        raise DefinitionError("it isn't a flask.Blueprint")
    return blueprint


def _add(app: Flask, blueprint: Blueprint) -> None:
    taken = {(rule.rule, method) for rule in app.url_map.iter_rules() for method in rule.methods or ()}
    app.register_blueprint(blueprint)
    for rule in (rule for rule in app.url_map.iter_rules() if rule.endpoint.startswith(f"{blueprint.name}.")):
        if not rule.rule.startswith(PREFIX):
            raise DefinitionError(f"{rule.rule} isn't below {PREFIX}")
        if any((rule.rule, method) in taken for method in rule.methods or ()):
            raise DefinitionError(f"{rule.rule} is already in use")
    # Before its other functions. On the application, because one blueprint serves every application of a process.
    app.before_request_funcs.setdefault(blueprint.name, []).insert(0, _authenticate)


def _authenticate() -> None:
    get_user_id()
