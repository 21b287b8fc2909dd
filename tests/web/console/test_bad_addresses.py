"""Addresses and forms that no browser sends: on every database the answer is below 500 and nothing changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from jinja2 import FileSystemBytecodeCache
from sqlalchemy import func, select

from aijobs.monitor.filters import PARAMETERS
from aijobs.operators.models import AuditLog
from aijobs.web.factory import create_app
from aijobs.wiring.services import build_services
from tests.support.databases import SERVER_FIRST
from tests.support.odd_texts import ODD_TEXTS
from tests.web.console.stage import Stage, build_settings, prepare

READ = {
    "/console/jobs": (*PARAMETERS, "cursor"),
    "/console/jobs/changes": ("ids", "since"),
    "/console/search": ("q",),
    "/console/outbox": ("cursor", "status", "eventType"),
    "/console/audit": ("target", "cursor"),
    "/console/login": ("next",),
}
"""Query parameters of each page."""


@pytest.fixture
def stage(
    create_database: Callable[..., str],
    redis_url: str,
    tmp_path: Path,
    compiled_templates: FileSystemBytecodeCache,
) -> Iterator[Stage]:
    """Like the stage of other tests, on each of the three databases."""
    services = build_services(build_settings(create_database(prepare), redis_url, tmp_path))
    app = create_app(services=services)
    app.jinja_env.bytecode_cache = compiled_templates
    yield Stage(services, app)
    services.database.engine.dispose()


@SERVER_FIRST
def test_odd_text_in_an_address_causes_no_server_error(stage: Stage) -> None:
    stage.queued()
    console = stage.client("SUPER_ADMIN")
    rules = [rule.rule for rule in stage.app.url_map.iter_rules() if "GET" in (rule.methods or ())]
    paths = [rule for rule in rules if rule.startswith("/console/") and "<" in rule]
    assert set(READ) < set(rules)
    for encoded in map(quote, ODD_TEXTS.values()):
        addresses = [f"{path}?{name}={encoded}" for path, names in READ.items() for name in names]
        for address in [re.sub(r"<[^>]*>", encoded, path) for path in paths] + addresses:
            assert console.get(address).status_code < 500, address


@SERVER_FIRST
def test_odd_text_in_a_form_or_header_causes_no_server_error(stage: Stage) -> None:
    console, stranger = stage.client("SUPER_ADMIN"), stage.client(None)
    for text in ODD_TEXTS.values():
        environ = {"HTTP_USER_AGENT": text.decode("latin-1"), "REMOTE_ADDR": text.decode("latin-1")}
        sent = {"content_type": "application/x-www-form-urlencoded", "environ_overrides": environ}
        address = f"/console/jobs/{stage.queued()}/cancel"
        body = _form(console.fields(address, address)) + quote(text)
        assert console.http.post(address, data=body, **sent).status_code in (303, 422), text
        token = stranger.fields("/console/login", "/console/login")["csrf_token"]
        body = f"csrf_token={quote(token)}&username={quote(text)}&password={quote(text)}"
        assert stranger.http.post("/console/login", data=body, **sent).status_code in (401, 422), text


def _form(fields: dict[str, str]) -> str:
    """Encode fields as a form does, `reason` last so that text can be appended to it."""
    return "&".join(f"{name}={quote(value)}" for name, value in fields.items() if name != "reason") + "&reason=x"


@pytest.mark.parametrize("text", ["\0", "a\0b", "x" * 256, " x", "a\x07"])
def test_invalid_target_of_the_audit_log_is_refused(stage: Stage, text: str) -> None:
    console = stage.client("SUPER_ADMIN")
    answer = console.http.get("/console/audit", query_string={"target": text})
    assert answer.status_code == 422
    with stage.services.database.read() as session:
        assert session.execute(select(func.count()).select_from(AuditLog)).scalar_one() == 1  # The sign-in.
