"""`aijobs operator …`: access is revoked at once and audited."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import select, update

from aijobs.cli.opening import open_services
from aijobs.clock import utc_now
from aijobs.operators.models import AuditLog, OperatorSession
from aijobs.web.factory import create_app
from aijobs.wiring.services import Services

Aijobs = Callable[..., tuple[int, str, str]]
OLD, NEW = "correct horse battery", "an even better password"
JOBS = "/admin-api/ai/jobs"


@pytest.fixture
def services(upgraded: Aijobs, monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    """The services of an instance with the operator ann."""
    _give_stdin(monkeypatch, OLD)
    assert upgraded("create-operator", "ann", "--password-stdin")[0] == 0
    with open_services() as opened:
        yield opened


@pytest.fixture
def app(services: Services) -> Flask:
    return create_app(services=services)


def _give_stdin(monkeypatch: pytest.MonkeyPatch, password: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(password + "\n"))


def _token(aijobs: Aijobs, label: str = "ci") -> dict[str, str]:
    code, out, _ = aijobs("operator-token", "ann", "--label", label)
    assert code == 0
    return {"Authorization": f"Bearer {out.strip()}"}


def _sign_in(app: Flask, password: str) -> int:
    return _enter(app.test_client(), password)


def _enter(client: FlaskClient, password: str) -> int:
    """Sign in as a browser does; return the status of the answer."""
    page = client.get("/console/login").text
    found = re.search(r'name="csrf_token"[^>]*value="([^"]+)"', page)
    assert found is not None
    form = {"csrf_token": found.group(1), "username": "ann", "password": password}
    return client.post("/console/login", data=form).status_code


def _listed(aijobs: Aijobs) -> dict[str, object]:
    (line,) = json.loads(aijobs("operator", "list", "--json")[1])
    return dict(line)


def _audit(services: Services) -> list[tuple[str, str, object, object]]:
    with services.database.read() as session:
        rows = session.scalars(select(AuditLog).where(AuditLog.target_type == "operator").order_by(AuditLog.id)).all()
    assert {(row.actor.partition(":")[0], row.target_id) for row in rows} == {("cli", "ann")}
    return [(row.action, row.before, row.after) for row in rows]


def test_disabled_operator_loses_sessions_and_tokens_at_once(aijobs: Aijobs, app: Flask) -> None:
    client, headers = app.test_client(), _token(aijobs)
    assert _enter(client, OLD) == 303
    assert (client.get("/console/jobs").status_code, client.get(JOBS, headers=headers).status_code) == (200, 200)
    assert aijobs("operator", "disable", "ann") == (0, "ann is disabled.\n", "")
    assert (client.get("/console/jobs").status_code, client.get(JOBS, headers=headers).status_code) == (303, 401)
    assert _sign_in(app, OLD) == 401
    assert aijobs("operator-token", "ann")[::2] == (1, "aijobs: operator 'ann' is disabled\n")
    assert aijobs("operator", "disable", "ann") == (0, "ann is disabled already.\n", "")
    assert aijobs("operator", "enable", "ann") == (0, "ann is enabled.\n", "")
    assert client.get("/console/jobs").status_code == 303, "a revoked session works again"
    assert client.get(JOBS, headers=headers).status_code == 200
    assert _sign_in(app, OLD) == 303


def test_new_password_ends_all_sessions(aijobs: Aijobs, app: Flask, monkeypatch: pytest.MonkeyPatch) -> None:
    client = app.test_client()
    assert _enter(client, OLD) == 303
    _give_stdin(monkeypatch, NEW)
    assert aijobs("operator", "password", "ann", "--password-stdin")[0] == 0
    assert client.get("/console/jobs").status_code == 303
    assert (_sign_in(app, OLD), _sign_in(app, NEW)) == (401, 303)


def test_revoked_token_is_unauthorized_and_others_still_work(aijobs: Aijobs, app: Flask) -> None:
    client, first, second = app.test_client(), _token(aijobs, "first"), _token(aijobs, "second")
    first_id = _listed(aijobs)["tokens"][0]["id"]
    assert aijobs("operator", "revoke-token", "ann", "--id", first_id)[1] == "1 token of ann revoked.\n"
    assert [client.get(JOBS, headers=headers).status_code for headers in (first, second)] == [401, 200]
    assert aijobs("operator", "revoke-token", "ann", "--id", first_id)[1] == "0 tokens of ann revoked.\n"
    assert aijobs("operator", "revoke-token", "ann", "--all")[1] == "1 token of ann revoked.\n"
    assert client.get(JOBS, headers=second).status_code == 401


def test_list_shows_the_last_use_of_a_token_but_not_the_token(aijobs: Aijobs, app: Flask) -> None:
    headers = _token(aijobs)
    assert "last used never" in aijobs("operator", "list")[1]
    app.test_client().get(JOBS, headers=headers)
    (token,) = _listed(aijobs)["tokens"]
    assert token["lastUsedAt"].endswith("Z")
    app.test_client().get(JOBS, headers=headers)
    assert _listed(aijobs)["tokens"] == [token], "each request writes the time"
    out = aijobs("operator", "list")[1] + aijobs("operator", "list", "--json")[1]
    assert "ajo_" not in out
    assert "argon2" not in out


def test_list_shows_sessions_of_an_operator_but_not_their_keys(aijobs: Aijobs, app: Flask) -> None:
    client = app.test_client()
    client.environ_base["HTTP_USER_AGENT"] = "Firefox/140"
    assert _enter(client, OLD) == 303
    (session,) = _listed(aijobs)["sessions"]
    assert {**session, "id": "", "createdAt": "", "seenAt": ""} == {
        "id": "",
        "username": "ann",
        "createdAt": "",
        "seenAt": "",
        "remoteAddr": "127.0.0.1",
        "userAgent": "Firefox/140",
        "ended": None,
    }
    line = aijobs("operator", "list")[1].splitlines()[-1]
    began, seen = session["createdAt"], session["seenAt"]
    assert line == f"  {session['id']}  session from 127.0.0.1  signed in {began}  last used {seen}  Firefox/140"


def test_expired_session_is_listed_as_ended(aijobs: Aijobs, app: Flask, services: Services) -> None:
    assert _enter(app.test_client(), OLD) == 303
    with services.database.transaction() as session:
        session.execute(update(OperatorSession).values(seen_at=utc_now() - timedelta(hours=13)))
    assert _listed(aijobs)["sessions"][0]["ended"] == "idle"
    assert "session from 127.0.0.1  ended (idle)  signed in" in aijobs("operator", "list")[1]


def test_revoked_session_ends_and_other_sessions_and_tokens_do_not(
    aijobs: Aijobs, app: Flask, services: Services
) -> None:
    headers, clients = _token(aijobs), [app.test_client() for _ in range(3)]
    found: list[str] = []
    for client in clients:
        assert _enter(client, OLD) == 303
        found += [row["id"] for row in _listed(aijobs)["sessions"] if row["id"] not in found]
    assert aijobs("operator", "revoke-session", "ann", "--id", found[0])[1] == "1 session of ann revoked.\n"
    assert [client.get("/console/jobs").status_code for client in clients] == [303, 200, 200]
    assert aijobs("operator", "revoke-session", "ann", "--id", found[0])[1] == "0 sessions of ann revoked.\n"
    assert aijobs("operator", "revoke-session", "ann", "--all")[1] == "2 sessions of ann revoked.\n"
    assert [client.get("/console/jobs").status_code for client in clients] == [303, 303, 303]
    assert app.test_client().get(JOBS, headers=headers).status_code == 200
    assert _listed(aijobs)["sessions"] == []
    assert [action for action, _, _ in _audit(services)][-2:] == ["operator.revoke_session"] * 2


def test_every_change_of_an_operator_is_audited(
    aijobs: Aijobs, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    _token(aijobs)
    aijobs("operator", "revoke-token", "ann", "--all")
    aijobs("operator", "disable", "ann")
    aijobs("operator", "enable", "ann")
    _give_stdin(monkeypatch, NEW)
    aijobs("operator", "password", "ann", "--password-stdin")
    rows = _audit(services)
    assert [action for action, _, _ in rows] == [
        "operator.create",
        "operator.token",
        "operator.revoke_token",
        "operator.disable",
        "operator.enable",
        "operator.password",
    ]
    assert rows[3][1:] == ({"role": "OPERATOR", "active": True}, {"role": "OPERATOR", "active": False})
    assert NEW not in str(rows)
    assert "ajo_" not in str(rows)


@pytest.mark.parametrize(
    "command",
    [
        ("disable",),
        ("enable",),
        ("revoke-token", "--all"),
        ("revoke-session", "--all"),
        ("password", "--password-stdin"),
    ],
    ids=lambda command: command[0],
)
def test_unknown_operator_is_reported_in_one_line(
    aijobs: Aijobs, services: Services, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    for name in ("bob", "ANN", "an\udcffn", "x" * 300, " "):
        _give_stdin(monkeypatch, NEW)
        code, out, err = aijobs("operator", command[0], name, *command[1:])
        assert (code, out) == (1, ""), name
        assert err.startswith("aijobs: there is no operator "), name
        assert err.count("\n") == 1, name


def test_revoke_needs_either_all_or_an_id_of_the_operator(aijobs: Aijobs, services: Services) -> None:
    _token(aijobs)
    assert aijobs("operator", "revoke-token", "ann")[0] == 2
    assert aijobs("operator", "revoke-token", "ann", "--all", "--id", "x")[0] == 2
    assert aijobs("operator", "revoke-token", "ann", "--id", "x")[0] == 1
    assert aijobs("operator", "revoke-session", "ann")[0] == 2
    assert aijobs("operator", "revoke-session", "ann", "--id", "x") == (
        1,
        "",
        "aijobs: operator 'ann' has no session 'x'\n",
    )
    assert _listed(aijobs)["tokens"][0].get("revokedAt") is None


@pytest.mark.parametrize("name", ["a\x1b[31m", "a\u202eb", " a", ""])
def test_name_or_label_with_invisible_characters_is_refused(
    aijobs: Aijobs, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    code, out, error = aijobs("operator-token", "ann", f"--label={name}")
    assert (code, out) == (2, "")
    assert "the label" in error
    code, out, error = aijobs("create-operator", "--password-stdin", "--", name)
    assert (code, out) == (2, "")
    assert "the username" in error


def test_empty_list_of_operators_says_how_to_create_one(upgraded: Aijobs) -> None:
    code, out, _ = upgraded("operator", "list")
    assert code == 0
    assert out == "There are no operators yet: `aijobs create-operator USERNAME` makes one.\n"
