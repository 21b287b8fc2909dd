"""The embedded broker: private, and ended together with its parent."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import threading
from pathlib import Path

import psutil
import pytest

from aijobs.errors import AijobsError, SettingsError
from aijobs.local.embedded import EmbeddedBroker
from aijobs.queues.broker import RedisBroker
from aijobs.queues.connection import connect
from aijobs.settings import Settings
from tests.support.messages import KEYS, outgoing
from tests.support.polling import poll
from tests.support.processes import Processes, Program, Run

KEEPER = """
import sys, time
from pathlib import Path
from aijobs.local.embedded import EmbeddedBroker
broker = EmbeddedBroker(Path(sys.argv[1]))
broker.start()
print(broker.pid, "started", flush=True)
time.sleep(600)
"""


@pytest.fixture
def instance(run: Run) -> Path:
    return run.new_folder("instance")


def address(instance: Path) -> dict[str, object]:
    return dict(json.loads((instance / "broker.json").read_text()))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def socket_of(broker_url: str) -> Path:
    return Path(broker_url.removeprefix("unix://"))


def start_keeper(processes: Processes, instance: Path) -> tuple[Program, psutil.Process]:
    keeper = processes.spawn([sys.executable, "-c", KEEPER, instance], name="keeper", env={"TMPDIR": str(instance)})
    said = keeper.wait_for_output("started", timeout=30)
    return keeper, psutil.Process(int(said.split()[-2]))


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_address_file_lets_other_processes_use_the_embedded_broker(instance: Path) -> None:
    with EmbeddedBroker(instance) as embedded:
        settings = Settings(instance_path=instance, message_keys=KEYS)
        broker, message = RedisBroker.from_settings(settings), outgoing()
        broker.send([message])

        assert address(instance) == {"url": embedded.url, "pid": embedded.pid}
        assert broker.find_missing([message]) == set()
        broker.client.close()


def test_embedded_broker_is_private_and_writes_nothing_to_disk(instance: Path) -> None:
    with EmbeddedBroker(instance) as embedded:
        socket = socket_of(embedded.url)
        with connect(embedded.url) as client:
            client.set("aijobs:x", "1")
            options = {name: client.config_get(name)[name] for name in ("port", "save", "maxmemory-policy")}

        assert options == {"port": "0", "save": "", "maxmemory-policy": "noeviction"}
        assert mode(instance / "broker.json") == 0o600
        assert mode(socket) == 0o600
        assert mode(socket.parent) == 0o700
        assert psutil.Process(embedded.pid).net_connections("inet") == []
        assert len(os.fsencode(socket)) <= 100


def test_stop_of_the_embedded_broker_leaves_no_file(instance: Path) -> None:
    embedded = EmbeddedBroker(instance)
    embedded.start()
    process, folder = psutil.Process(embedded.pid), socket_of(embedded.url).parent

    embedded.stop()
    embedded.stop()

    assert has_ended(process)
    assert not folder.exists()
    assert not (instance / "broker.json").exists()
    with pytest.raises(AijobsError, match="doesn't run"):
        assert embedded.pid


def test_stopped_embedded_broker_can_be_started_again(instance: Path) -> None:
    embedded = EmbeddedBroker(instance)
    for _ in range(2):
        with embedded, connect(embedded.url) as client:
            assert client.ping()


def test_embedded_broker_ends_when_its_parent_is_killed(processes: Processes, instance: Path) -> None:
    keeper, server = start_keeper(processes, instance)

    os.kill(keeper.pid, signal.SIGKILL)

    poll(lambda: has_ended(server), what="the broker ended with its parent")


def test_files_of_a_killed_parent_do_not_stop_the_next_start(processes: Processes, instance: Path) -> None:
    keeper, server = start_keeper(processes, instance)
    stale = address(instance)
    keeper.kill()
    poll(lambda: has_ended(server), what="the broker ended with its parent")

    with EmbeddedBroker(instance) as embedded:
        assert embedded.url != stale["url"]
        assert address(instance)["url"] == embedded.url
        assert not socket_of(str(stale["url"])).parent.exists()


@pytest.mark.parametrize("junk", ["", "{", "[]", '{"url": 7}', '{"url": "unix:///etc/passwd", "pid": 1}'])
def test_invalid_address_file_does_not_stop_the_start(instance: Path, junk: str) -> None:
    (instance / "broker.json").write_text(junk)

    with EmbeddedBroker(instance) as embedded:
        assert address(instance)["pid"] == embedded.pid
    assert Path("/etc/passwd").exists()


def test_second_embedded_broker_of_an_instance_is_refused(instance: Path) -> None:
    with EmbeddedBroker(instance) as first:
        with pytest.raises(SettingsError, match="runs already"):
            EmbeddedBroker(instance).start()

        assert address(instance)["pid"] == first.pid
        with connect(first.url) as client:
            assert client.ping()


def test_embedded_broker_outlives_the_thread_that_started_it(instance: Path) -> None:
    embedded = EmbeddedBroker(instance)
    starter = threading.Thread(target=embedded.start)
    starter.start()
    starter.join()

    with connect(embedded.url) as client:
        # The kernel would have killed it with the thread, long before a few hundred answers.
        assert all(client.ping() for _ in range(300))
    embedded.stop()


def test_long_temporary_folder_does_not_lengthen_the_socket_path(
    instance: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = run.new_folder("x" * 120)
    monkeypatch.setattr("tempfile.tempdir", str(deep))

    with EmbeddedBroker(instance) as embedded, connect(embedded.url) as client:
        assert client.ping()
    assert list(deep.iterdir()) == []


def test_server_that_fails_to_start_is_reported_and_leaves_no_file(
    instance: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aijobs.local.embedded.server_binary", lambda: "/bin/false")

    with pytest.raises(AijobsError, match="did not come up"):
        EmbeddedBroker(instance).start()

    assert not (instance / "broker.json").exists()
    monkeypatch.undo()
    with EmbeddedBroker(instance) as embedded:
        assert embedded.pid
