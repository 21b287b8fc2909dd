"""Failures of the command line: one line and the right exit code, and nothing is started."""

from __future__ import annotations

import io
import json
import stat
from collections.abc import Callable
from pathlib import Path

import jwt
import pytest
from sqlalchemy import select

from aijobs.cli import run
from aijobs.cli.demo import SAMPLE_NOTES, read_text_file
from aijobs.cli.failures import Failure
from aijobs.cli.up import FIRST_OPERATOR_FILE, ensure_first_operator
from aijobs.db.database import Database
from aijobs.db.schema import HEAD
from aijobs.learning.notes import MAX_CHARACTERS
from aijobs.operators.models import Operator, OperatorToken
from aijobs.settings import Settings
from aijobs.web.auth import token_digest, verify_password

Aijobs = Callable[..., tuple[int, str, str]]


COMMANDS = [
    ["up"],
    ["demo"],
    ["db"],
    ["db", "upgrade"],
    ["create-operator"],
    ["operator-token"],
    ["operator"],
    ["operator", "list"],
    ["operator", "disable"],
    ["operator", "enable"],
    ["operator", "password"],
    ["operator", "revoke-token"],
    ["token"],
    ["job"],
    ["cancel"],
    ["retry"],
    ["outbox"],
    ["outbox", "requeue"],
    ["credentials"],
    ["credentials", "rotate"],
    ["demo-data"],
    ["dev-llm"],
]


@pytest.mark.parametrize("command", [[], *COMMANDS], ids=" ".join)
def test_every_command_has_help_without_settings_or_database(aijobs: Aijobs, command: list[str]) -> None:
    code, out, err = aijobs(*command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith("Usage: " + " ".join(["aijobs", *command]))


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["token"],
        ["token", "--user", "a", "--hours", "0"],
        ["token", "--user", "a", "--hours", "much"],
        ["token", "--user", " a"],
        ["token", "--user", "a\nb"],
        ["job"],
        ["up", "extra"],
        ["db", "downgrade"],
        ["create-operator", "ann", "--role", "KING"],
        ["create-operator", "ann"],
        ["create-operator", " "],
        ["demo", "/nowhere/at/all.txt"],
    ],
    ids=" ".join,
)
def test_invalid_arguments_give_one_line_and_exit_code_2(aijobs: Aijobs, instance: Path, arguments: list[str]) -> None:
    code, out, err = aijobs(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("aijobs: ")
    assert err.count("\n") == 1
    assert not (instance / "aijobs.db").exists()


# --- files of the demo --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"GIF89a\x00\x01", "NUL bytes"),
        ("café".encode("latin-1"), "not UTF-8: byte 3"),
        ("光合作用".encode("gbk"), "not UTF-8"),
        (b"word " * (MAX_CHARACTERS // 5 + 1), "characters"),
        (b"x" * (4 * MAX_CHARACTERS + 1), "too long"),
    ],
)
def test_file_without_text_is_refused_before_anything_starts(
    aijobs: Aijobs, instance: Path, tmp_path: Path, content: bytes, said: str
) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(content)
    code, out, err = aijobs("demo", str(file))
    assert (code, out) == (2, "")
    assert said in err
    assert str(file) in err
    assert err.count("\n") == 1
    assert not instance.exists()


def test_folder_instead_of_a_file_is_refused(aijobs: Aijobs, tmp_path: Path) -> None:
    code, _, err = aijobs("demo", str(tmp_path))
    assert (code, "is a folder" in err) == (2, True)


def test_byte_order_mark_of_a_file_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(b"\xef\xbb\xbf" + b"Osmosis is the movement of water.\n")
    text = read_text_file(file)
    assert text.notes["segments"][0]["text"] == "Osmosis is the movement of water."
    assert text.notes["lang"] == "en"


def test_shipped_notes_are_in_english_and_chinese() -> None:
    texts = [read_text_file(path) for path in sorted(SAMPLE_NOTES.glob("*.txt"))]
    assert [text.notes["lang"] for text in texts] == ["en", "zh"]
    with pytest.raises(Failure, match="No such file"):
        read_text_file(SAMPLE_NOTES / "fr.txt")


# --- database and operators ---------------------------------------------------------------------------------


def test_database_without_a_schema_is_refused(aijobs: Aijobs, instance: Path) -> None:
    code, out, err = aijobs("operator-token", "ann")
    assert (code, out) == (1, "")
    assert err == "aijobs: the database has no schema yet: run `aijobs db upgrade`\n"
    assert not (instance / "aijobs.db").exists()


def test_unreachable_database_gives_one_line(aijobs: Aijobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIJOBS_DATABASE_URL", "postgresql+psycopg://nobody:secret@127.0.0.1:1/none")
    code, out, err = aijobs("db", "upgrade")
    assert (code, out) == (1, "")
    assert err.startswith("aijobs: the database says: ")
    assert err.count("\n") == 1
    assert "secret" not in err


def test_upgrade_reports_the_schema_versions(aijobs: Aijobs) -> None:
    assert aijobs("db", "upgrade")[1] == f"The schema is at {HEAD} now (before: none).\n"
    assert aijobs("db", "upgrade")[1] == f"The schema is at {HEAD} already.\n"
    assert json.loads(aijobs("db", "upgrade", "--json")[1]) == {"before": HEAD, "now": HEAD}


def _give_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_operator_is_created_with_a_password_from_standard_input(
    upgraded: Aijobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    _give_stdin(monkeypatch, "correct horse battery\n")
    code, out, _ = upgraded("create-operator", "ann", "--role", "VIEWER", "--password-stdin")
    assert (code, out) == (0, "Made operator ann (VIEWER).\n")
    database = Database(Settings.load().database_url)
    with database.read() as session:
        ann = session.scalars(select(Operator)).one()
    database.dispose()
    assert verify_password(ann.password_hash, "correct horse battery")
    assert ann.role == "VIEWER"
    _give_stdin(monkeypatch, "correct horse battery\n")
    code, out, err = upgraded("create-operator", "ann", "--password-stdin")
    assert (code, out, err) == (1, "", "aijobs: there is an operator 'ann' already\n")


@pytest.mark.parametrize("password", ["", "short", "x" * 201])
def test_password_of_the_wrong_length_is_refused(
    upgraded: Aijobs, monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    _give_stdin(monkeypatch, password + "\n")
    code, _, err = upgraded("create-operator", "ann", "--password-stdin")
    assert code == 2
    assert "10–200 characters" in err


def test_operator_token_is_printed_once_and_stored_as_a_digest(
    upgraded: Aijobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    _give_stdin(monkeypatch, "correct horse battery\n")
    upgraded("create-operator", "ann", "--password-stdin")
    code, out, _ = upgraded("operator-token", "ann", "--label", "ci")
    token = out.strip()
    assert code == 0
    assert token.startswith("ajo_")
    database = Database(Settings.load().database_url)
    with database.read() as session:
        row = session.scalars(select(OperatorToken)).one()
    database.dispose()
    assert (row.token_hash, row.label) == (token_digest(token), "ci")
    assert row.expires_at is not None
    assert upgraded("operator-token", "bob")[0] == 1


def test_user_token_has_user_expiry_and_audience(aijobs: Aijobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIJOBS_JWT_SECRET", "s" * 40)
    monkeypatch.setenv("AIJOBS_JWT_AUDIENCE", "learning")
    code, out, _ = aijobs("token", "--user", "ann", "--hours", "2")
    claims = jwt.decode(out.strip(), "s" * 40, algorithms=["HS256"], audience="learning")
    assert code == 0
    assert claims["sub"] == "ann"
    assert claims["exp"] - claims["iat"] == 7200


# --- the first operator -------------------------------------------------------------------------------------


def test_first_operator_is_created_once_and_shown_again(upgraded: Aijobs, instance: Path) -> None:
    settings = Settings.load()
    database = Database(settings.database_url)
    first = ensure_first_operator(database, settings)
    assert first.startswith("admin / ")
    assert ensure_first_operator(database, settings) == first
    assert stat.S_IMODE((instance / FIRST_OPERATOR_FILE).stat().st_mode) == 0o600
    with database.transaction() as session:
        session.scalars(select(Operator)).one().password_hash = "changed"
    assert ensure_first_operator(database, settings) == "admin, with the password that you gave"
    database.dispose()


def test_first_operator_is_not_created_if_there_is_one(
    upgraded: Aijobs, instance: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _give_stdin(monkeypatch, "correct horse battery\n")
    upgraded("create-operator", "ann", "--password-stdin")
    settings = Settings.load()
    database = Database(settings.database_url)
    assert "create-operator" in ensure_first_operator(database, settings)
    database.dispose()
    assert not (instance / FIRST_OPERATOR_FILE).exists()


@pytest.mark.parametrize("arguments", [[], ["outbox"], ["db"]])
def test_command_without_its_subcommand_shows_its_help(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    output = capsys.readouterr().err
    assert output.startswith("Usage: aijobs")
    assert "\nCommands:\n" in output
