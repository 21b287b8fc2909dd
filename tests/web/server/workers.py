"""Our gunicorn worker with other limits, so that a test decides which of them is met."""

from __future__ import annotations

from aijobs.web.server_worker import BufferingWorker


class Patient(BufferingWorker):
    """Gives up on nobody while a test lasts, but has room for few."""

    receive_s = 600.0
    most_incoming = 40


class Hasty(BufferingWorker):
    """Gives up soon."""

    receive_s = 0.5
    answer_s = 0.5
