"""The actor of shell commands. Like operators in the console, it leaves rows in the audit log."""

from __future__ import annotations

import os
import pwd

from aijobs.operators.audit import Actor


def shell_actor() -> Actor:
    """Return the account of the shell, `cli:{name}`."""
    try:
        return Actor(f"cli:{pwd.getpwuid(os.getuid()).pw_name}")
    except KeyError:  # A container's user id may have no name.
        return Actor(f"cli:{os.getuid()}")
