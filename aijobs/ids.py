"""Names: UUIDv7 ids, and instance ids that say which process they stand for.

An instance id is made of the host, the boot, the PID namespace, the pid, the process's start time and a random
part, so that a consumer that starts can tell which holders of its own host are gone, and judges no one else.
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
    """A UUIDv7 as text: sorts by time, and within one process by order of making."""
    return str(uuid_utils.uuid7())


@dataclass(frozen=True)
class InstanceId:
    """One running process. `str()` gives the id that `locked_by` and the heartbeat's key carry."""

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
        """The id of this process; a new one at each call, so ask once a process."""
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
        """The id that `text` (an instance id, or a lock token `{instance}/{random}`) holds, or None."""
        parts = text.split("/", 1)[0].split(_SEPARATOR)
        if len(parts) != 6 or not _PID.fullmatch(parts[3]):
            return None
        host, boot, namespace, pid, started, nonce = parts
        return cls(host, boot, namespace, int(pid), started, nonce)

    @property
    def host_prefix(self) -> str:
        """How the ids of all processes of this host begin."""
        return self.host + _SEPARATOR

    def is_dead_beside(self, observer: InstanceId) -> bool:
        """Whether `observer` can see that this process is gone.

        Only a process of the observer's own host, boot and PID namespace is judged: two machines may share a host
        name, so another boot id may be another machine, and its leases wait for the clock. A pid that is free, a pid
        with another start time, or the observer's own pid under another nonce (an exec) is dead.
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
    """The kernel's boot id, shortened; empty where there is none (not Linux)."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip().replace("-", "")[:12] if path.exists() else ""


def _pid_namespace() -> str:
    """The inode of this process's PID namespace; empty where there is none."""
    path = Path("/proc/self/ns/pid")
    return os.readlink(path).strip("pid:[]") if path.is_symlink() else ""


_HIDDEN = "hidden"


def _process_started(pid: int) -> str | None:
    """The start time of `pid` in clock ticks since boot, or None where no such process lives.

    `_HIDDEN` where one lives that this process may not look at: another user's, where /proc is mounted with hidepid.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return _HIDDEN if _answers(pid) else None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _answers(pid: int) -> bool:
    """Whether the kernel knows such a process, by a signal that does nothing."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
