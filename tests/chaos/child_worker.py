"""The child process of a chaos consumer. It has no crash points, because its death would be charged to the job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from aijobs import child_worker
from tests.chaos.crashes import CrashPoints


def main(end: int, lifeline: int) -> NoReturn:
    """Run the child on these file descriptors of connection and lifeline."""
    from tests.chaos.consumer import install_recorder

    folder = Path(os.environ["CHAOS_FOLDER"])
    install_recorder(CrashPoints(folder / "none", "suspect"), folder)
    child_worker.main(end, lifeline)
