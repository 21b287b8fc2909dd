"""`aijobs dev-llm` as a process: its printed lines work, and Ctrl-C ends it completely."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import urllib.request
from pathlib import Path

import psutil

from aijobs.ai.catalogue import Catalogue
from aijobs.ai.provider import Route
from aijobs.testing.fakellm import faults
from tests.support.processes import Processes, Run

AIJOBS = str(Path(sys.executable).with_name("aijobs"))
KEY = "sk-canary-0123456789"


def post(url: str, model: str) -> dict[str, object]:
    body = {"model": model, "messages": [{"role": "user", "content": "my secret thought"}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        found: dict[str, object] = json.load(answer)
        return found


def test_dev_llm_prints_lines_that_work_and_ctrl_c_ends_it(processes: Processes, run: Run) -> None:
    instance = run.new_folder("dev llm")
    program = processes.spawn(
        [AIJOBS, "dev-llm", "--port", "0"], env={"AIJOBS_INSTANCE_PATH": str(instance)}, name="dev-llm"
    )
    said = program.wait_for_output("Ctrl-C stops it.", timeout=30)
    found = re.search(r"is up at (http://127\.0\.0\.1:(\d+))\.", said)
    assert found
    url, port = found[1], int(found[2])

    exported = re.search(r"^export AIJOBS_PROVIDERS='(.+)'$", said, re.MULTILINE)
    assert exported
    catalogue = Catalogue.load(exported[1], {})
    assert catalogue.routes["default"] == (Route("devllm", "dev-1"),)
    assert catalogue.providers["devllm"].base_url == url
    assert catalogue.providers["devllm"].ready
    assert {f"fault:{name}" for name in faults.FAULTS} < set(catalogue.providers["devllm"].models)

    assert post(url, "dev-1")["object"] == "chat.completion"
    assert post(url, "fault:blank")["object"] == "chat.completion"
    said = program.wait_for_output("#2  fault:blank  whole  200  5 + 15 tokens\n", timeout=10)
    assert re.search(r"^#1  dev-1  whole  200  5 \+ \d+ tokens$", said, re.MULTILINE)

    children = psutil.Process(program.pid).children(recursive=True)
    hanging = socket.create_connection(("127.0.0.1", port), timeout=10)
    with hanging:
        body = json.dumps({"model": "fault:hang", "messages": [{"role": "user", "content": "x"}]}).encode()
        head = f"POST /chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        hanging.sendall(head.encode() + body)
        program.send_signal(signal.SIGINT)
        assert program.wait(timeout=20) == 0
    assert children == []
    assert program.output.endswith("Stopped.\n")
    assert "secret" not in program.output
    assert "canary" not in program.output
