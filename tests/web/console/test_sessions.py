"""The page of sessions, their lifetime, and the messages after their end."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from itsdangerous import TimestampSigner
from sqlalchemy import select, update

from aijobs.clock import utc_now
from aijobs.operators.models import AuditLog, Operator, OperatorSession
from aijobs.settings import resource
from aijobs.web.auth import POLLERS
from tests.web.console.stage import Console, Stage, parse

FIREFOX = "Mozilla/5.0 (Windows NT 10.0; Win64; x64; rv:140.0) Gecko/20100101 Firefox/140.0"
PHONE = (
    "Mozilla/5.0 (iPhone; CPU iPhone OS 18_5 like Mac OS X) AppleWebKit/605.1.15 (KHTML, like Gecko) "
    "Version/18.5 Mobile/15E148 Safari/604.1"
)


def _browser(stage: Stage, role: str = "OPERATOR", agent: str = FIREFOX, language: str = "en") -> Console:
    client = stage.app.test_client()
    client.environ_base["HTTP_USER_AGENT"] = agent
    console = Console(client, language)
    assert console.sign_in(role.lower()).status_code == 303
    return console


def _change(stage: Stage, **values: Any) -> None:
    """Set columns of every session, for example to let time pass."""
    with stage.services.database.transaction() as session:
        session.execute(update(OperatorSession).values(**values))


def _seen(stage: Stage) -> datetime:
    with stage.services.database.read() as session:
        return session.execute(select(OperatorSession.seen_at)).scalar_one()


def _audit(stage: Stage) -> list[tuple[str, str, str]]:
    with stage.services.database.read() as session:
        query = select(AuditLog.action, AuditLog.actor, AuditLog.target_id).order_by(AuditLog.at, AuditLog.id)
        rows = [tuple(row) for row in session.execute(query.where(AuditLog.target_type == "operator"))]
    return [(action, actor, target) for action, actor, target in rows]


def _rows(soup: Any, title: str) -> list[list[str]]:
    """Return the cells of each row of the list under a title."""
    card = soup.find(id=title).find_parent("section")
    return [[cell.get_text(" ", strip=True) for cell in row.find_all(["th", "td"])] for row in card.select("tbody tr")]


def _revoke(console: Console, soup: Any, title: str, index: int = 0) -> Any:
    """Submit the form of a row."""
    form = soup.find(id=title).find_parent("section").select("tbody form")[index]
    fields = {field["name"]: field["value"] for field in form.find_all("input")}
    return console.post(form["action"], fields)


# --- lifetime --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", sorted(POLLERS))
def test_polls_do_not_prolong_the_session(stage: Stage, element: str) -> None:
    console = stage.client()
    long_ago = (utc_now() - timedelta(hours=11)).replace(microsecond=0)
    _change(stage, seen_at=long_ago)
    poll = {"HX-Request": "true", "HX-Trigger": element, "HX-Current-URL": "http://localhost/console/workers"}
    for address in ("/console/workers", "/console/jobs/changes", "/console/queues"):
        answer = console.get(address, **poll)
        assert answer.status_code == 200
        assert "Set-Cookie" not in answer.headers, "the browser would keep the cookie for longer"
    assert _seen(stage) == long_ago
    _change(stage, seen_at=utc_now() - timedelta(hours=12))
    ended = console.get("/console/workers", **poll)
    assert (ended.status_code, ended.text) == (401, "")
    assert ended.headers["HX-Redirect"] == "/console/login?next=/console/workers"


@pytest.mark.parametrize(
    ("address", "headers"),
    [
        ("/console/jobs", {}),
        ("/console/jobs", {"HX-Request": "true"}),
        ("/console/jobs", {"HX-Request": "true", "HX-Trigger": "filters"}),
        ("/admin-api/ai/jobs", {}),
    ],
)
def test_use_prolongs_the_session_and_is_written_at_most_once_a_minute(
    stage: Stage, address: str, headers: dict[str, str]
) -> None:
    console = stage.client()
    _change(stage, seen_at=utc_now() - timedelta(hours=11))
    before = utc_now() - timedelta(seconds=1)
    assert console.get(address, **headers).status_code == 200
    seen = _seen(stage)
    assert seen > before
    console.get(address, **headers)
    assert _seen(stage) == seen


def test_every_polling_element_is_listed_as_a_poller() -> None:
    asking = set()
    for path in Path(resource("templates")).rglob("*.html"):
        for tag in re.findall(
            r"<[a-z]+\s[^<]*hx-trigger=\"(?:load|every|revealed|intersect|aijobs:)[^<]*", path.read_text()
        ):
            found = re.search(r'\bid="([^"]+)"', tag)
            assert found, f"{path.name}: an element that polls needs an id, so that its requests are recognised"
            asking.add(found[1])
    assert asking == POLLERS


def test_form_works_as_long_as_its_session(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    console = stage.client()
    fields = console.fields("/console/queues", "/console/preferences")
    monkeypatch.setattr(TimestampSigner, "get_timestamp", lambda _: int(time.time()) + 11 * 3600)
    assert console.post("/console/preferences", {**fields, "language": "zh"}).status_code == 303
    assert console.soup("/console/queues").html["lang"] == "zh-CN"


# --- sign-in and sign-out --------------------------------------------------------------------------------------


def test_sign_in_starts_a_new_session(stage: Stage) -> None:
    console = stage.client(None)
    console.get("/console/login")
    planted = stage.copy_of(console)
    assert console.sign_in("operator").status_code == 303
    assert planted.get("/console/jobs").status_code == 303
    first = stage.copy_of(console)
    console.post("/console/logout", console.fields("/console/jobs", "/console/logout"))
    assert console.sign_in("operator").status_code == 303
    assert first.get("/console/jobs").status_code == 303, "the old session came back with a new sign-in"
    assert console.get("/console/jobs").status_code == 200


def test_sign_out_ends_only_this_session_and_is_audited(stage: Stage) -> None:
    console, other = stage.client(), stage.client()
    console.post("/console/logout", console.fields("/console/jobs", "/console/logout"))
    assert console.get("/console/jobs").status_code == 303
    assert other.get("/console/jobs").status_code == 200
    assert _audit(stage) == [("operator.revoke_session", "operator:operator", "operator")]
    assert console.get("/console/login").status_code == 200
    assert "session ended" not in console.get("/console/login").text


def test_token_of_another_session_of_the_same_operator_is_refused(stage: Stage) -> None:
    console, other = stage.client(), stage.client()
    fields = other.fields("/console/jobs", "/console/logout")
    assert console.post("/console/logout", fields).status_code == 400
    assert console.get("/console/jobs").status_code == 200


def test_cookie_contains_nothing_about_the_operator(stage: Stage) -> None:
    from flask.sessions import SecureCookieSessionInterface

    console = stage.client()
    with stage.services.database.read() as session:
        operator = session.execute(select(Operator).where(Operator.username == "operator")).scalar_one()
        row = session.execute(select(OperatorSession)).scalar_one()
    (cookie,) = console.http._cookies.values()
    serializer = SecureCookieSessionInterface().get_signing_serializer(stage.app)
    held = str(serializer.loads(cookie.value))  # type: ignore[union-attr]
    for known in (operator.id, operator.username, row.id, row.key_hash):
        assert known not in held


# --- messages after the end ------------------------------------------------------------------------------------

ENDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "idle": ({"seen_at": utc_now() - timedelta(hours=12)}, "signed out after 12 hours without use", "12小时未使用"),
    "expired": ({"created_at": utc_now() - timedelta(days=7)}, "signed out 7 days after the sign-in", "登录已满7天"),
    "revoked": ({"revoked_at": utc_now()}, "it was signed out elsewhere", "它已在别处被退出登录"),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_sign_in_page_says_why_the_session_ended(stage: Stage, name: str, language: str) -> None:
    values, english, chinese = ENDS[name]
    console = stage.client("OPERATOR", language)
    _change(stage, **values)
    refused = console.get("/console/queues?x=1")
    assert (refused.status_code, urlsplit(refused.headers["Location"]).path) == (303, "/console/login")
    page = console.soup(refused.headers["Location"])
    assert (english if language == "en" else chinese) in page.find(role="status").get_text()
    assert console.sign_in("operator").status_code == 303
    assert console.get("/console/queues").status_code == 200


def test_deleted_session_leads_to_the_sign_in(stage: Stage) -> None:
    console = stage.client()
    with stage.services.database.transaction() as session:
        session.query(OperatorSession).delete()
    assert console.get("/console/jobs").status_code == 303
    assert "Your session ended" in console.soup("/console/login").find(role="status").get_text()


def test_sign_in_page_without_an_earlier_session_mentions_none(stage: Stage) -> None:
    assert "session ended" not in stage.client(None).get("/console/login").text


# --- the page ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["VIEWER", "OPERATOR", "SUPER_ADMIN"])
def test_operator_sees_their_own_sessions_and_which_is_this_one(stage: Stage, role: str) -> None:
    _browser(stage, role, PHONE)
    console = _browser(stage, role)
    soup = console.soup("/console/sessions")
    menu = soup.select_one("details.menu")
    assert menu.find("a", href="/console/sessions")
    rows = _rows(soup, "own-title")
    assert [row[0] for row in rows] == ["Firefox on Windows This session", "Safari on iPhone"]
    assert {row[1] for row in rows} == {"127.0.0.1"}
    assert {row[4] for row in rows} == {"Sign out"}
    assert "12 hours" in soup.main.get_text()
    assert "7 days" in soup.main.get_text()
    assert (soup.find(id="others-title") is not None) == (role == "SUPER_ADMIN")


def test_operator_signs_out_one_of_their_own_sessions(stage: Stage) -> None:
    phone, console = _browser(stage, agent=PHONE), _browser(stage)
    answer = _revoke(console, console.soup("/console/sessions"), "own-title", 1)
    assert (answer.status_code, answer.headers["Location"]) == (303, "/console/sessions")
    assert phone.get("/console/jobs").status_code == 303
    soup = console.soup("/console/sessions")
    assert "1 session was signed out." in soup.main.get_text()
    assert len(_rows(soup, "own-title")) == 1
    assert _audit(stage) == [("operator.revoke_session", "operator:operator", "operator")]


def test_operator_signs_out_everywhere_else(stage: Stage) -> None:
    others, console, bystander = [_browser(stage) for _ in range(2)], _browser(stage), _browser(stage, "VIEWER")
    fields = console.fields("/console/sessions", "/console/sessions/revoke-others")
    assert console.post("/console/sessions/revoke-others", fields).status_code == 303
    soup = console.soup("/console/sessions")
    assert "2 sessions were signed out." in soup.main.get_text()
    assert [other.get("/console/jobs").status_code for other in others] == [303, 303]
    assert [one.get("/console/jobs").status_code for one in (console, bystander)] == [200, 200]
    assert soup.find("form", action="/console/sessions/revoke-others") is None, "there is nothing else to sign out"
    assert _audit(stage) == [("operator.revoke_session", "operator:operator", "operator")]


def test_sign_out_of_this_session_in_the_list_leads_to_the_sign_in(stage: Stage) -> None:
    console = _browser(stage)
    thief = stage.copy_of(console)
    answer = _revoke(console, console.soup("/console/sessions"), "own-title")
    assert answer.headers["Location"] == "/console/login"
    assert [one.get("/console/jobs").status_code for one in (console, thief)] == [303, 303]


def test_super_admin_sees_and_signs_out_all_sessions(stage: Stage) -> None:
    viewer, admin = _browser(stage, "VIEWER", PHONE), _browser(stage, "SUPER_ADMIN")
    soup = admin.soup("/console/sessions")
    assert [row[:2] for row in _rows(soup, "others-title")] == [["viewer", "Safari on iPhone"]]
    assert _revoke(admin, soup, "others-title").status_code == 303
    assert viewer.get("/console/jobs").status_code == 303
    assert _audit(stage) == [("operator.revoke_session", "operator:super_admin", "viewer")]
    soup = admin.soup("/console/sessions")
    assert "Nobody else is signed in" in soup.main.get_text()
    assert "Session revoked" in admin.get("/console/audit").text


@pytest.mark.parametrize("session_id", ["other", "nonsense", "01900000-0000-7000-8000-000000000000"])
def test_session_of_another_operator_is_not_found(stage: Stage, session_id: str) -> None:
    admin, console = _browser(stage, "SUPER_ADMIN"), _browser(stage)
    if session_id == "other":
        with stage.services.database.read() as session:
            query = select(OperatorSession.id).join(Operator).where(Operator.username == "super_admin")
            session_id = session.execute(query).scalar_one()
    fields = console.fields("/console/sessions", "/console/logout")
    answer = console.post(f"/console/sessions/{session_id}/revoke", fields)
    assert answer.headers["Location"] == "/console/sessions"
    assert "You have no such session." in console.soup("/console/sessions").main.get_text()
    assert admin.get("/console/jobs").status_code == 200
    assert _audit(stage) == []


def test_revocation_needs_a_post_with_a_token(stage: Stage) -> None:
    other, console = _browser(stage), _browser(stage)
    for address in ("/console/sessions/revoke-others", "/console/sessions/x/revoke"):
        assert console.get(address).status_code in (404, 405)
        assert console.post(address).status_code == 400
    assert other.get("/console/jobs").status_code == 200
    assert stage.client(None).get("/console/sessions").status_code == 303


@pytest.mark.parametrize("agent", ["<script>alert(1)</script>", "", "x" * 5000, "\x00\x1b[31m", "浏览器/1"])
def test_any_user_agent_can_be_listed(stage: Stage, agent: str) -> None:
    console = _browser(stage, agent=agent.encode().decode("latin-1"))
    answer = console.get("/console/sessions")
    assert answer.status_code == 200
    assert "<script>alert" not in answer.text
    assert "This session" in parse(answer).main.get_text()
