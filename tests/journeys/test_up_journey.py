"""`aijobs up` with real processes: its printed lines work, and it leaves no process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.polling import poll
from tests.support.ports import free_port
from tests.support.processes import Processes, Program, Run, clean_environment

AIJOBS = str(Path(sys.executable).with_name("aijobs"))
STARTED = "Ctrl-C stops everything."


@dataclass
class Up:
    """A running `aijobs up` and the environment of its instance."""

    program: Program
    instance: Path
    env: dict[str, str]

    def run(self, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run another command on the same instance."""
        return subprocess.run(
            [AIJOBS, *arguments], env=clean_environment(self.env), capture_output=True, text=True, timeout=timeout
        )

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.program.pid).children(recursive=True)


@pytest.fixture
def up(processes: Processes, run: Run) -> Up:
    instance = run.new_folder("up")
    env = {"AIJOBS_INSTANCE_PATH": str(instance), "AIJOBS_PORT": str(free_port())}
    program = processes.spawn([AIJOBS, "up"], env=env, name="up")
    program.wait_for_output(STARTED, timeout=60)
    return Up(program, instance, env)


def paste(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line as if it was pasted into a shell."""
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)


def _all_gone(found: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(found, timeout=0)[1]


def test_up_prints_lines_that_work_and_sigterm_leaves_no_process(up: Up, tmp_path: Path) -> None:
    said = up.program.output
    assert f"http://127.0.0.1:{up.env['AIJOBS_PORT']}/console/" in said
    assert re.search(r"Sign in +admin / \S{16}\n", said)
    assert stat.S_IMODE((up.instance / "first-operator.json").stat().st_mode) == 0o600

    line = next(line for line in said.splitlines() if line.startswith("A="))
    pasted = paste(line)
    assert pasted.returncode == 0
    assert '"lifecycleStatus":"succeeded"' in pasted.stdout.replace(": ", ":")
    assert "movement of water across a partially permeable membrane" in pasted.stdout

    second = up.run("up")
    assert second.returncode == 1
    assert second.stderr.count("\n") == 1
    assert f"process {up.program.pid}, http://127.0.0.1:{up.env['AIJOBS_PORT']}" in second.stderr

    file = tmp_path / "notes.txt"
    file.write_text("La la la. Oh yes, oh no.\n")
    demo = up.run("demo", str(file))
    assert "Using the aijobs that is up" in demo.stdout
    assert demo.returncode == 1
    assert "VALIDATION_NOTHING_TO_EXTRACT" in demo.stderr
    assert demo.stderr.count("\n") == 1
    console = f"http://127.0.0.1:{up.env['AIJOBS_PORT']}/console/"
    assert re.search(rf"^  {console}jobs/\S+  notes.txt$", demo.stdout, re.MULTILINE)
    made = up.run("demo-data").stdout
    assert made.endswith(f"See them in the console: {console}\n")
    assert "Starting" not in made

    consumer = next(p for p in up.descendants() if "aijobs.workers.background" in p.cmdline())
    consumer.kill()
    up.program.wait_for_output("background ended (killed by SIGKILL); starting it again")
    poll(
        lambda: any("aijobs.workers.background" in p.cmdline() for p in up.descendants() if p.is_running()),
        what="a new consumer",
    )

    broker = json.loads((up.instance / "broker.json").read_text())
    psutil.Process(broker["pid"]).kill()
    up.program.wait_for_output("the embedded broker ended; starting everything again with a new one")
    poll(lambda: "succeeded" in paste(line).stdout, timeout=30, what="a job by way of the new broker")

    children = up.descendants()
    assert len(children) >= 5  # Broker, web server and three consumers.
    assert up.program.stop(signal.SIGTERM, timeout=40) == 0
    assert _all_gone(children)
    assert up.program.output.endswith("Stopped.\n")
    assert not (up.instance / "broker.json").exists()
    assert sorted(path.name for path in up.instance.glob("aijobs.db*")) == ["aijobs.db"]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux alone does this")
def test_killed_up_leaves_no_process_and_does_not_block_the_next(up: Up, processes: Processes) -> None:
    children = up.descendants()
    password = re.search(r"Sign in +(.*)\n", up.program.output)
    up.program.kill()
    poll(lambda: _all_gone(children), timeout=30, what="the end of all children")

    again = processes.spawn([AIJOBS, "up"], env=up.env, name="up-again")
    said = again.wait_for_output(STARTED, timeout=60)
    assert password
    assert password[0] in said  # The same first operator with the same password.
    os.kill(again.pid, signal.SIGINT)
    assert again.wait(40) == 0


def test_taken_configured_port_is_refused_in_one_line(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        env = {"AIJOBS_INSTANCE_PATH": str(run.new_folder("up")), "AIJOBS_PORT": str(port)}
        done = subprocess.run([AIJOBS, "up"], env=clean_environment(env), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == f"aijobs: can't listen on 127.0.0.1:{port}: Address already in use\n"
