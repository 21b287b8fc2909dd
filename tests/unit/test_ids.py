"""Ids sort by time; an instance id names its process, and whether that is dead can be decided only beside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aijobs.ids import InstanceId, new_id


def test_ids_are_uuids_of_version_7_in_creation_order() -> None:
    ids = [new_id() for _ in range(5000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == 5000
    assert all(re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", one) for one in ids)


def test_instance_id_is_parsed_from_its_text_and_from_a_lease_token() -> None:
    one, two = InstanceId.current(), InstanceId.current()
    assert one != two, "each start has a random part of its own"
    assert replace(two, nonce=one.nonce) == one
    assert one.pid == os.getpid()
    assert InstanceId.parse(str(one)) == one
    assert InstanceId.parse(f"{one}/0123456789abcdef") == one
    assert len(str(one)) + 17 <= 255, "a token fits its column"
    assert str(one).startswith(one.host_prefix)


@pytest.mark.parametrize("text", ["", "dispatcher/ab", "worker-1", "a~b~c~d~e~f", "a~b~c~1~e", "a~b~c~1~e~f~g", "/x"])
def test_invalid_instance_id_is_none(text: str) -> None:
    assert InstanceId.parse(text) is None


@given(st.text(max_size=80))
def test_any_text_can_be_parsed_as_an_instance_id(text: str) -> None:
    parsed = InstanceId.parse(text)
    assert parsed is None or str(parsed).split("~")[:3] == text.split("/", 1)[0].split("~")[:3]


def test_odd_host_name_gives_a_valid_instance_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "we~ird/höst name" * 20)
    one = InstanceId.current()
    assert InstanceId.parse(f"{one}/tok") == one
    assert len(one.host) <= 64


def test_ended_process_is_dead_and_running_process_is_not() -> None:
    me = InstanceId.current()
    child = subprocess.Popen(
        [sys.executable, "-c", "from aijobs.ids import InstanceId; print(InstanceId.current(), flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        other = InstanceId.parse(child.stdout.readline().strip())
        assert other is not None
        assert not other.is_dead_beside(me)
        # A pid that another process has now: same number, other start time.
        assert replace(other, started="1").is_dead_beside(me)
        child.kill()
        poll_zombie = other.is_dead_beside
        child.wait(10)
        assert poll_zombie(me)
    finally:
        child.kill()
        child.communicate()


def test_earlier_instance_of_the_same_process_is_dead() -> None:
    me = InstanceId.current()
    before = replace(me, nonce="00000000")
    assert before.is_dead_beside(me)
    assert not me.is_dead_beside(me)


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"boot": "f" * 12}, {"pid_namespace": "1"}])
def test_instance_of_another_host_boot_or_namespace_is_never_dead(change: dict[str, Any]) -> None:
    me = InstanceId.current()
    gone = replace(me, pid=2**22 + 1, started="1", nonce="00000000")
    assert gone.is_dead_beside(me)
    assert not replace(gone, **change).is_dead_beside(me)


@pytest.mark.parametrize("unknown", [{"boot": ""}, {"pid_namespace": ""}])
def test_instance_is_never_dead_if_boot_or_namespace_is_unknown(unknown: dict[str, Any]) -> None:
    me = replace(InstanceId.current(), **unknown)
    assert not replace(me, pid=2**22 + 1, started="1", nonce="00000000").is_dead_beside(me)


def test_hidden_process_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """If /proc is mounted with hidepid, processes of other users seem to be absent."""
    me = InstanceId.current()
    read = Path.read_text

    def hidden(path: Path, *args: Any, **kwargs: Any) -> str:
        if path.name == "stat":
            raise FileNotFoundError(path)
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", hidden)
    assert not replace(me, pid=os.getppid(), started="1").is_dead_beside(me)
    assert replace(me, pid=2**22 + 1, started="1").is_dead_beside(me)
    assert replace(me, pid=10**30, started="1").is_dead_beside(me)
