"""UUIDv7 ids, and instance ids of processes.

An instance id consists of host, boot, PID namespace, pid, the process's start time and a random part. A starting
consumer can tell which holders of its own host are dead, and judges no others.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

import uuid_utils

_SEPARATOR = "~"
_PID = re.compile(r"[0-9]{1,10}")


def new_id() -> str:
    """Return a UUIDv7 as text. It sorts by time, and within one process by order of creation."""
    return str(uuid_utils.uuid7())


@dataclass(frozen=True)
class InstanceId:
    """A process. `str()` is the id in `locked_by` and in the heartbeat's key."""

    host: str
    boot: str
    pid_namespace: str
    pid: int
    started: str
    nonce: str

    def __str__(self) -> str:
        return _SEPARATOR.join((self.host, self.boot, self.pid_namespace, str(self.pid), self.started, self.nonce))

    @classmethod
    def current(cls) -> InstanceId:
        """Return an id of this process; a new one at each call, so call it once per process."""
        pid = os.getpid()
        host = "".join(c if c.isalnum() or c in "-." else "-" for c in socket.gethostname())[:64] or "localhost"
        return cls(
            host=host,
            boot=_boot_id(),
            pid_namespace=_pid_namespace(),
            pid=pid,
            started=_process_started(pid) or "0",
            nonce=secrets.token_hex(4),
        )

    @classmethod
    def parse(cls, text: str) -> InstanceId | None:
        """Return the id in `text` (an instance id, or a lease token `{instance}/{random}`), or None."""
        parts = text.split("/", 1)[0].split(_SEPARATOR)
        if len(parts) != 6 or not _PID.fullmatch(parts[3]):
            return None
        host, boot, namespace, pid, started, nonce = parts
        return cls(host, boot, namespace, int(pid), started, nonce)

    @property
    def host_prefix(self) -> str:
        """Return the prefix of the ids of all processes of this host."""
        return self.host + _SEPARATOR

    def is_dead_beside(self, observer: InstanceId) -> bool:
        """Return whether `observer` can see that this process is dead.

        Only a process of the same host, boot and PID namespace is judged: two machines may share a host name, so
        another boot id may be another machine. A free pid, a pid with another start time, and the observer's own pid
        with another nonce (an exec) are dead.
        """
        if (self.host, self.boot, self.pid_namespace) != (observer.host, observer.boot, observer.pid_namespace):
            return False
        if not self.boot or not self.pid_namespace:
            return False
        if self.pid == observer.pid and self.started == observer.started:
            return self.nonce != observer.nonce
        return _process_started(self.pid) not in (self.started, _HIDDEN)

    def is_hidden_from(self, observer: InstanceId) -> bool:
        """Return whether `observer` can't tell if this process lives, for example in another container."""
        return (self.boot, self.pid_namespace) != (observer.boot, observer.pid_namespace)


def _boot_id() -> str:
    """Return the kernel's boot id, shortened; empty if there is none (not Linux)."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip().replace("-", "")[:12] if path.exists() else ""


def _pid_namespace() -> str:
    """Return the inode of this process's PID namespace; empty if there is none."""
    path = Path("/proc/self/ns/pid")
    return os.readlink(path).strip("pid:[]") if path.is_symlink() else ""


_HIDDEN = "hidden"


def _process_started(pid: int) -> str | None:
    """Return the start time of `pid` in clock ticks since boot; None if no such process lives.

    `_HIDDEN` if one lives that this process may not read: another user's, if /proc is mounted with hidepid.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return _HIDDEN if _answers(pid) else None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _answers(pid: int) -> bool:
    """Return whether such a process exists, by signal 0."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
