"""Who acts from a shell. It leaves rows in the audit log, as what operators do in the console does."""

from __future__ import annotations

import os
import pwd

from aijobs.operators.audit import Actor


def shell_actor() -> Actor:
    """The account of the shell, `cli:{name}`."""
    try:
        return Actor(f"cli:{pwd.getpwuid(os.getuid()).pw_name}")
    except KeyError:  # A container may run under a number that has no name.
        return Actor(f"cli:{os.getuid()}")
