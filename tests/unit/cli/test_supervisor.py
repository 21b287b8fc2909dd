"""Child processes: restarted when they die, and ended with their supervisor."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from aijobs.errors import AijobsError
from aijobs.local import supervisor as supervision
from aijobs.local.station import AlreadyUp, InstanceLock, StopRequests, listen
from aijobs.local.supervisor import ChildDied, ChildSpec, Supervisor
from aijobs.settings import Settings
from tests.support.polling import poll
from tests.support.processes import Processes

STUBBORN = (
    "import signal, subprocess, sys, time;"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print(subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)']).pid, flush=True);"
    "time.sleep(600)"
)


def _spec(code: str, name: str = "child", **options: float) -> ChildSpec:
    return ChildSpec(name, [sys.executable, "-S", "-c", code], **options)  # type: ignore[arg-type]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def supervisor(tmp_path: Path, said: list[str]) -> Iterator[Supervisor]:
    made = Supervisor(tmp_path / "logs", said.append)
    yield made
    made.stop(lambda: True)


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_dead_child_is_restarted_after_a_growing_wait(
    supervisor: Supervisor, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_BACK_OFF_S", 0.02)
    child = supervisor.start(_spec("raise SystemExit(3)"))

    def died_three_times() -> bool:
        supervisor.revive()
        return len(said) == 3

    poll(died_three_times, what="three deaths")
    waits = [float(line.split("again in ")[1].split(" s")[0]) for line in said]
    assert waits == [waits[0], 2 * waits[0], 4 * waits[0]]
    assert all(line.startswith("child ended (exit code 3)") and str(child.log) in line for line in said)


def test_running_child_is_not_restarted(supervisor: Supervisor, said: list[str]) -> None:
    child = supervisor.start(_spec("import time; time.sleep(600)"))
    first = child.pid
    for _ in range(3):
        supervisor.revive()
    assert (child.pid, said) == (first, [])
    supervisor.require_alive()


def test_death_during_the_start_is_reported_with_its_reason(supervisor: Supervisor) -> None:
    child = supervisor.start(_spec("raise SystemExit('no such port')", name="web"))
    poll(lambda: not child.is_running, what="its end")
    with pytest.raises(ChildDied, match=r"web ended \(exit code 1\): no such port"):
        supervisor.require_alive()


def test_refusal_line_is_reported_instead_of_later_server_output(supervisor: Supervisor) -> None:
    code = "print('aijobs: the setting is wrong'); print('[ERROR] Worker failed to boot.'); raise SystemExit(3)"
    child = supervisor.start(_spec(code, name="web"))
    poll(lambda: not child.is_running, what="its end")
    with pytest.raises(ChildDied, match=r"web ended \(exit code 3\): the setting is wrong$"):
        supervisor.require_alive()


def test_signal_that_killed_a_child_is_named(supervisor: Supervisor) -> None:
    child = supervisor.start(_spec("import time; time.sleep(600)"))
    child.signal(signal.SIGKILL)
    poll(lambda: not child.is_running, what="its end")
    assert child.describe_end() == "child ended (killed by SIGKILL)"


def test_child_that_ignores_sigterm_is_killed_with_its_descendants(supervisor: Supervisor) -> None:
    child = supervisor.start(_spec(STUBBORN, stop_timeout_s=0.2))
    grandchild = int(poll(lambda: child.log.read_text().strip(), what="the grandchild's pid"))
    pid = child.pid
    supervisor.stop(lambda: False)
    assert pid is not None
    poll(lambda: _is_gone(pid) and _is_gone(grandchild), what="both ends")


def test_second_stop_request_skips_the_grace_time(supervisor: Supervisor) -> None:
    child = supervisor.start(_spec(STUBBORN, stop_timeout_s=600))
    poll(lambda: child.log.read_text().strip(), what="its start")
    pid = child.pid
    hurry = threading.Event()
    threading.Timer(0.1, hurry.set).start()
    supervisor.stop(hurry.is_set)
    assert pid is not None
    assert _is_gone(pid)


def test_log_of_the_previous_run_is_kept(tmp_path: Path) -> None:
    for word in ("first", "second"):
        supervisor = Supervisor(tmp_path, print)
        child = supervisor.start(_spec(f"print({word!r})"))
        poll(lambda child=child: not child.is_running, what="its end")
        supervisor.stop(lambda: False)
    assert (tmp_path / "child.log").read_text() == "second\n"
    assert (tmp_path / "child.log.1").read_text() == "first\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux alone does this")
def test_children_end_if_their_supervisor_is_killed(processes: Processes, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from aijobs.local.supervisor import *\n"
        "s = Supervisor(Path(sys.argv[1]), print)\n"
        "child = s.start(ChildSpec('child', [sys.executable, '-S', '-c', 'import time; time.sleep(600)']))\n"
        "print('child', child.pid, flush=True); time.sleep(600)\n"
    )
    program = processes.spawn([sys.executable, "-c", code, str(tmp_path)], name="supervisor")
    pid = int(program.wait_for_output("child").split()[1])
    poll(lambda: psutil.Process(pid).cmdline()[-1:] == ["import time; time.sleep(600)"], what="its start")
    program.kill()
    poll(lambda: _is_gone(pid), what="the child's end")


# --- instance lock, port and signals ------------------------------------------------------------------------


def test_second_instance_lock_is_refused_and_names_the_first(tmp_path: Path) -> None:
    first = InstanceLock(tmp_path)
    first.take()
    first.tell("http://127.0.0.1:8000")
    with pytest.raises(AlreadyUp, match=rf"process {os.getpid()}, http://127.0.0.1:8000") as refused:
        InstanceLock(tmp_path).take()
    assert refused.value.url == "http://127.0.0.1:8000"
    first.release()
    again = InstanceLock(tmp_path)
    again.take()
    again.release()


def test_pid_file_of_a_killed_process_does_not_block_the_lock(tmp_path: Path) -> None:
    (tmp_path / "up.pid").write_text("1\nhttp://127.0.0.1:8000\n")
    lock = InstanceLock(tmp_path)
    lock.take()
    lock.tell("http://127.0.0.1:9")
    assert (tmp_path / "up.pid").read_text() == f"{os.getpid()}\nhttp://127.0.0.1:9\n"
    lock.release()


def test_taken_port_is_replaced_if_allowed_and_otherwise_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with listen("127.0.0.1", port, may_differ=True) as other:
            assert other.getsockname()[1] != port
        with pytest.raises(AijobsError, match=rf"can't listen on 127.0.0.1:{port}: Address already in use"):
            listen("127.0.0.1", port, may_differ=False)


def test_default_port_is_8000() -> None:
    assert Settings.port == 8000


def test_first_signal_requests_a_stop_and_the_second_a_hurry() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequests().listening() as stop:
        assert not stop.asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(5)
        assert (stop.asked, stop.hurried) == (True, False)
        os.kill(os.getpid(), signal.SIGINT)
        poll(lambda: stop.hurried, what="the second signal")
    assert signal.getsignal(signal.SIGTERM) == before
