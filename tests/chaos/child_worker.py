"""The child of a chaos run's consumer. It passes no crash point: its death would be charged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from aijobs import child_worker
from tests.chaos.crashes import CrashPoints


def main(end: int, lifeline: int) -> NoReturn:
    """Be the child whose ends of connection and lifeline these are."""
    from tests.chaos.consumer import install_books

    folder = Path(os.environ["CHAOS_FOLDER"])
    install_books(CrashPoints(folder / "none", "suspect"), folder)
    child_worker.main(end, lifeline)
