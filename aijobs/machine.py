"""Operating system functions: files for their owner alone, and children that end with their parent."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

_LAUNCH = """
import ctypes, os, signal, sys
parent, command = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != parent:
    sys.exit("the parent is gone")
os.execv(command[0], command)
"""


def tied_command(command: Sequence[str]) -> list[str]:
    """Return `command` for a child that the kernel sends SIGTERM when the thread that starts it ends (Linux).

    A small program asks for that and then becomes the child, because nothing may run between fork and exec in a process
    with threads.
    """
    return [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command]


def write_private(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, readable by its owner alone."""
    _draft(path, text).replace(path)


def create_private(path: Path, text: str) -> bool:
    """Do the same unless `path` exists. Return whether this call created it.

    Several processes may do so at once: the file appears whole, and one of them was first.
    """
    draft = _draft(path, text)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def _draft(path: Path, text: str) -> Path:
    draft = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return draft
