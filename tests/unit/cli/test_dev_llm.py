"""`aijobs dev-llm` in the cases in which it starts no server."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

from aijobs.cli.dev_llm import line_of
from aijobs.clock import utc_now
from aijobs.testing.fakellm import faults
from aijobs.testing.fakellm.ledger import Call
from aijobs.testing.fakellm.request import CHAT, Request

Aijobs = Callable[..., tuple[int, str, str]]


def test_list_of_faults_needs_no_server_and_creates_no_instance(aijobs: Aijobs, instance: Path) -> None:
    code, out, err = aijobs("dev-llm", "--list", "--json")
    entries = {entry["name"]: entry for entry in json.loads(out)}
    assert (code, err, set(entries)) == (0, "", set(faults.FAULTS))
    assert entries["429"]["params"] == ["retry_after_s", "as_date"]
    assert aijobs("dev-llm", "--list")[1] == faults.as_text()
    assert not instance.exists()


def test_json_without_the_list_is_an_invalid_argument(aijobs: Aijobs) -> None:
    assert aijobs("dev-llm", "--json") == (2, "", "aijobs: --json goes with --list\n")


def test_taken_port_is_reported_in_one_line(aijobs: Aijobs, instance: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = aijobs("dev-llm", "--port", str(port))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"aijobs: port {port} can't be listened on: ")
    assert not (instance / "dev-llm.toml").exists()


def test_call_is_logged_in_one_line_for_any_model_name() -> None:
    request = Request(CHAT, "/v1/chat/completions", {"authorization": "Bearer sk-canary"}, {"model": "a\nb\x1b[2J"})
    call = Call(7, request, utc_now(), step="hang", left_after_s=1.25)
    assert line_of(call) == "#7  'a\\nb\\x1b[2J'  whole  no answer  (hang)  the client left after 1.2 s"
