"""The order in which a worker thread takes messages and suspects."""

from __future__ import annotations

import threading

import pytest

from aijobs.logs import Outage, get_logger
from aijobs.queues.consumer import JobWorker


class Queue:
    """A queue with a number of workers, waiting messages and suspects; it records what was taken."""

    def __init__(self, workers: int, messages: int, suspects: int) -> None:
        self.workers, self.messages, self.suspects = workers, messages, suspects
        self.outage = Outage(get_logger(__name__), "broker")
        self.taken: list[str] = []

    def dequeue(self) -> str | None:
        self.messages -= 1
        return "message" if self.messages >= 0 else None

    def execute(self, task: str, _now: object) -> None:
        self.taken.append(task)

    def run_suspect(self) -> bool:
        self.suspects -= 1
        if self.suspects >= 0:
            self.taken.append("suspect")
        return self.suspects >= 0


@pytest.mark.parametrize(
    ("workers", "order"),
    [(1, ["message", "message", "suspect", "suspect"]), (2, ["suspect", "suspect", "message", "message"])],
)
def test_suspect_waits_for_messages_only_if_no_other_thread_takes_them(workers: int, order: list[str]) -> None:
    queue = Queue(workers, messages=2, suspects=2)
    worker = JobWorker(queue, threading.Event(), 0.1, 1.0, 1.1)
    for _ in order:
        worker.loop()
    worker.loop()
    assert queue.taken == order


def test_stopping_worker_starts_no_suspect() -> None:
    queue, stop = Queue(1, messages=0, suspects=1), threading.Event()
    stop.set()
    JobWorker(queue, stop, 0.1, 1.0, 1.1).loop()
    assert queue.taken == []
