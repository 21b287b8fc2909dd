"""The commands of the walk-through, typed into one shell, step by step, over a real `aijobs up`."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts import documents
from tests.contracts.sources import ROOT
from tests.support.ports import free_port
from tests.support.processes import Processes, Run, clean_environment

PAGE = "docs/walk-through.md"
BIN = Path(sys.executable).parent
BASH = shutil.which("bash") or "bash"

EXPECTED = {
    3: ("Made 15 jobs",),
    # Usually queued, but a quick worker may lock it before the answer to its creation.
    4: ('"jobType":"flashcard_generation"', "\n202\n", '"lifecycleStatus":"succeeded"', '"flashcards":[{'),
    5: ("\n200\n", "IDEMPOTENCY_KEY_REUSED", "\n409\n"),
    6: ('"phase":"cancel_requested"', '"phase":"cancelled"', "cancel_requested  user:demo"),
    7: ("failed, 0 %", "attempt 3  failed", "/console/jobs/"),
    8: ("succeeded, 100 %", "lease_lost", "attempt 2  locked"),
    9: ("\n202\n", '"broker":"away"', '"lifecycleStatus":"succeeded"', "\n200\n", "All promises hold"),
}
"""Texts that each step must print, in this order. Steps 1, 2 and 10 are `make` targets."""


def steps() -> dict[int, str]:
    """Return the commands of each step."""
    parts = re.split(r"^## (\d+)\. .*$", documents.read(PAGE), flags=re.MULTILINE)[1:]
    numbered = zip(map(int, parts[::2]), parts[1::2], strict=True)
    return {n: "".join(b.text for b in documents.blocks(text) if b.language == "sh") for n, text in numbered}


def _run(command: list[str], text: str) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout + done.stderr


def test_walk_through_has_ten_steps_of_valid_shell() -> None:
    assert list(steps()) == list(range(1, 11))
    for number, commands in steps().items():
        assert commands, number
        assert _run([BASH, "-n"], commands) == "", number
    assert _run([BASH, "-n"], documents.read("docs/walk-through.sh")) == ""


def test_steps_use_exactly_the_functions_of_the_shell_file() -> None:
    helpers = set(re.findall(r"^(\w+)\(\)", documents.read("docs/walk-through.sh"), re.MULTILINE))
    used = {
        word
        for commands in steps().values()
        for word in re.findall(r"\b(ask|job_id|wait_for|synthetic|holder|broker)\b", commands)
    }
    assert used == helpers


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ('{"finishedAt": "2026-11-29T15:59:32.195Z"}', "The job J has ended"),
        ('{"lockedBy": null, "finishedAt": null}', "No worker has taken the job J yet"),
    ],
)
def test_holder_ends_when_no_worker_holds_the_job(tmp_path: Path, shown: str, said: str) -> None:
    done = _helper(tmp_path, "holder J", shown)
    assert done.returncode == 1
    assert done.stdout == ""
    assert said in done.stderr


def test_holder_prints_the_process_of_the_worker(tmp_path: Path) -> None:
    assert _helper(tmp_path, "holder J", '{"lockedBy": "host~boot~ns~4711~1~x"}').stdout == "4711\n"


def test_wait_for_ends_without_an_answer(tmp_path: Path) -> None:
    done = _helper(tmp_path, "wait_for J", "a-token")
    assert done.returncode == 1
    assert "The job J isn't final yet" in done.stderr


def _helper(folder: Path, command: str, answer: str) -> subprocess.CompletedProcess[str]:
    """Run a function of the shell file, with an `aijobs` that prints `answer` and an address without a server."""
    stub = folder / "aijobs"
    stub.write_text(f"#!/bin/sh\necho {shlex.quote(answer)}\n")
    stub.chmod(0o755)
    (folder / "up.pid").write_text(f"1\nhttp://127.0.0.1:{free_port()}\n")
    extra = {"AIJOBS": str(stub), "AIJOBS_INSTANCE_PATH": str(folder), "LOOKS": "2"}
    return subprocess.run(
        [BASH, "-c", f". docs/walk-through.sh && {command}"],
        env=clean_environment(extra),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def shell(processes: Processes, run: Run) -> Iterator[subprocess.Popen[str]]:
    """A shell in the project's folder, and a running `aijobs up`."""
    instance = run.new_folder("walk")
    environment = {"AIJOBS_INSTANCE_PATH": str(instance), "AIJOBS_PORT": str(free_port())}
    up = processes.spawn([BIN / "aijobs", "up"], env=environment, cwd=ROOT, name="up")
    up.wait_for_output("aijobs is up", timeout=60)
    environment["AIJOBS"] = str(BIN / "aijobs")
    opened = subprocess.Popen(
        [BASH],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=clean_environment(environment),
        cwd=ROOT,
        text=True,
    )
    run.started(opened.pid)
    yield opened
    opened.communicate("exit\n", timeout=10)
    run.ended(opened.pid)
    assert up.stop(timeout=60) == 0


def say(shell: subprocess.Popen[str], commands: str) -> str:
    """Type `commands` and return their output."""
    assert shell.stdin is not None
    assert shell.stdout is not None
    end = "--- typed ---"
    shell.stdin.write(commands.replace(".venv/bin", str(BIN)) + f"\necho; echo '{end}'\n")
    shell.stdin.flush()
    lines = []
    for line in shell.stdout:
        if line.strip() == end:
            break
        lines.append(line)
    return "\n" + "".join(lines)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_step_prints_what_the_page_says(shell: subprocess.Popen[str]) -> None:
    for number, shown in EXPECTED.items():
        output = say(shell, steps()[number])
        at = 0
        for text in shown:
            assert text in output[at:], f"step {number} should show {text!r}:\n{output}"
            at = output.index(text, at)
