"""Programs that tests start: they always end with the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.support.polling import poll
from tests.support.processes import Processes, Run

ROOT = Path(__file__).parents[2]

# Starts a child that would live for ten minutes, prints its pid, and waits.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""


def child_of(output: str) -> int:
    return int(output.partition("child ")[2].partition("\n")[0])


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_poll_returns_the_first_true_value() -> None:
    values = iter([0, "", "found"])
    assert poll(lambda: next(values), timeout=5) == "found"


def test_poll_fails_with_the_condition_and_the_last_value() -> None:
    with pytest.raises(AssertionError, match="the moon; last value: 0"):
        poll(lambda: 0, timeout=0.05, what="the moon")


def test_program_ends_with_its_children(run: Run) -> None:
    processes = Processes(run)
    program = processes.spawn([sys.executable, "-c", PARENT])
    child = child_of(program.wait_for_output("\n"))
    assert not is_gone(child)
    processes.stop_all()
    assert program.returncode == -signal.SIGTERM
    poll(lambda: is_gone(child), what="the child is gone")


def test_program_that_ignores_sigterm_is_killed(processes: Processes) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);print('up', flush=True); time.sleep(600)"
    program = processes.spawn([sys.executable, "-c", code])
    program.wait_for_output("up")
    assert program.stop(timeout=0.2) == -signal.SIGKILL


def test_program_does_not_inherit_developer_settings(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIJOBS_DATABASE_URL", "sqlite:///precious.db")
    code = "import os; print(os.environ.get('AIJOBS_DATABASE_URL'), os.environ['AIJOBS_REDIS_URL'])"
    program = processes.spawn([sys.executable, "-c", code], env={"AIJOBS_REDIS_URL": "redis://here"})
    assert program.wait() == 0
    assert program.output == "None redis://here\n"


def test_program_that_ends_early_is_reported_with_its_output(processes: Processes) -> None:
    program = processes.spawn([sys.executable, "-c", "print('no such file')"])
    with pytest.raises(AssertionError, match="no such file"):
        program.wait_for_output("ready")


def test_running_program_is_listed_as_leftover(run: Run, processes: Processes) -> None:
    program = processes.spawn(["sleep", "600"])
    assert any(line.startswith(f"{program.pid} ") for line in run.leftovers())
    program.stop()
    assert not any(line.startswith(f"{program.pid} ") for line in run.leftovers())


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_processes_and_folder_of_a_killed_pytest_are_removed(tmp_path: Path, end: signal.Signals) -> None:
    script = textwrap.dedent(
        f"""
        import sys, time
        from tests.support.processes import Processes, Run
        run = Run()
        program = Processes(run).spawn([sys.executable, "-c", {PARENT!r}])
        print(run.folder, program.pid, program.wait_for_output("\\n"), flush=True)
        time.sleep(600)
        """
    )
    outer = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert outer.stdout is not None
    line = outer.stdout.readline()
    folder, program_pid, child = Path(line.split()[0]), int(line.split()[1]), child_of(line)
    os.kill(outer.pid, end)
    outer.wait(10)
    outer.stdout.close()
    poll(lambda: is_gone(program_pid) and is_gone(child), what="the program and its child are gone")
    poll(lambda: not folder.exists(), what="the folder is gone")
