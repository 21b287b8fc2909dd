"""One storage per queue keeps the last popped message of each worker."""

from __future__ import annotations

import threading
from typing import Any

from aijobs.definitions.definition import INTERACTIVE
from aijobs.queues import hueys
from aijobs.queues.crew import Crew
from aijobs.queues.hueys import AiJobsHuey
from aijobs.settings import Settings


def test_workers_that_start_concurrently_share_one_storage(
    monkeypatch: Any,
) -> None:
    made: list[object] = []
    both_ask = threading.Barrier(2, timeout=0.3)
    real = hueys.QueueStorage

    def slowly(*args: Any, **options: Any) -> Any:
        storage = real(*args, **options)
        made.append(storage)
        try:
            both_ask.wait()
        except threading.BrokenBarrierError:
            return storage  # The other thread waits for this one.
        return storage

    monkeypatch.setattr(hueys, "QueueStorage", slowly)
    queue = AiJobsHuey(
        INTERACTIVE.queue_name, lambda _: Crew(), load_settings=lambda: Settings(redis_url="redis://127.0.0.1:1/0")
    )
    seen: list[object] = []
    threads = [threading.Thread(target=lambda: seen.append(queue.storage)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert seen == [made[0], made[0]]
