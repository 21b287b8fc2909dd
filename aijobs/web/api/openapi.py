"""The operations of the APIs, the source of both routes and OpenAPI documents."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flask import Blueprint, Flask, Response, jsonify, request

from aijobs.errors import describe
from aijobs.web.api.schemas import PARAMETERS, SCHEMAS
from aijobs.web.auth import require_right

ALWAYS = ("INTERNAL_ERROR", "SERVICE_BUSY")
"""Errors of every operation."""


@dataclass(frozen=True)
class Operation:
    """One route: its request and its answers."""

    method: str
    path: str
    """The path in OpenAPI's form: `/api/ai/jobs/{jobId}`."""
    view: Callable[..., Response]
    summary: str
    answers: Mapping[int, str | None]
    """The schema of each successful answer; None: no body."""
    errors: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    """Names in `schemas.PARAMETERS`, except those of the path."""
    body: str | None = None
    body_required: bool = True
    location: bool = False
    """Whether a `Location` header names the new resource."""
    right: str | None = None
    """The right that an operator needs."""

    @property
    def rule(self) -> str:
        """Return the path in Flask's form: `/api/ai/jobs/<job_id>`."""
        return re.sub(r"\{(\w+)\}", lambda found: f"<{_snake(found[1])}>", self.path)

    @property
    def path_parameters(self) -> list[str]:
        return re.findall(r"\{(\w+)\}", self.path)


def add_operations(blueprint: Blueprint, operations: Sequence[Operation]) -> None:
    """Add a route for every operation."""
    for operation in operations:
        view = require_right(operation.right)(operation.view) if operation.right else operation.view
        blueprint.add_url_rule(
            operation.rule, endpoint=operation.view.__name__, view_func=view, methods=[operation.method]
        )


def add_document(app: Flask, path: str, document: Callable[[], dict[str, Any]], endpoint: str) -> None:
    """Serve an OpenAPI document. It holds nothing secret, so it is public."""

    def show() -> Response:
        return jsonify(document() | {"servers": [{"url": request.root_path or "/"}]})

    app.add_url_rule(path, endpoint=endpoint, view_func=show, methods=["GET"])


def build_document(
    title: str, description: str, operations: Sequence[Operation], security: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these operations. `security`: the security schemes, any of which is enough."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _describe(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1", "description": description, "license": {"name": "MIT"}},
        "security": [{name: []} for name in security],
        "paths": paths,
        "components": {"schemas": _used_schemas(operations), "securitySchemes": dict(security)},
    }


def _describe(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.view.__name__,
        "summary": operation.summary,
        "responses": _responses(operation),
    }
    if operation.right:
        described["description"] = f"Needs the right `{operation.right}`."
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in operation.path_parameters
    ]
    parameters += [{"name": name, **PARAMETERS[name]} for name in operation.parameters]
    if parameters:
        described["parameters"] = parameters
    if operation.body:
        described["requestBody"] = {
            "required": operation.body_required,
            "content": {"application/json": {"schema": _ref(operation.body)}},
        }
    return described


def _responses(operation: Operation) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, schema in operation.answers.items():
        responses[str(status)] = {"description": _DESCRIPTIONS[status]}
        if schema is not None:
            responses[str(status)]["content"] = {"application/json": {"schema": _ref(schema)}}
        if operation.location:
            responses[str(status)]["headers"] = {"Location": {"schema": {"type": "string"}}}
    by_status: dict[int, list[str]] = {}
    for code in (*operation.errors, *ALWAYS):
        by_status.setdefault(describe(code).http, []).append(code)
    for status, codes in sorted(by_status.items()):
        shape = {
            "allOf": [_ref("Error")],
            "properties": {"error": {"properties": {"code": {"enum": codes}}}},
        }
        responses[str(status)] = {
            "description": ", ".join(codes),
            "content": {"application/json": {"schema": shape}},
        }
    return responses


_DESCRIPTIONS = {200: "OK.", 201: "Created.", 202: "Accepted: the job runs later.", 204: "Deleted."}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _used_schemas(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the schemas that these operations use, directly or indirectly."""
    waiting = {"Error"} | {s for o in operations for s in (*o.answers.values(), o.body) if s is not None}
    used: dict[str, Any] = {}
    while waiting:
        name = waiting.pop()
        used[name] = SCHEMAS[name]
        waiting |= set(re.findall(r"#/components/schemas/(\w+)", str(SCHEMAS[name]))) - set(used)
    return dict(sorted(used.items()))


def _snake(name: str) -> str:
    return re.sub(r"([A-Z])", lambda found: "_" + found[1].lower(), name)
