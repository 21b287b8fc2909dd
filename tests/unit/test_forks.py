"""A forked child has free locks and its own event loop for provider calls."""

from __future__ import annotations

import asyncio
import threading

from aijobs.ai.providers.openai_compatible import LoopThread
from aijobs.forks import new_lock, renew_in_child
from tests.support.forking import forked


def test_lock_held_by_a_thread_of_the_parent_is_free_in_the_child() -> None:
    lock, held, over = new_lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait()

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    held.wait()

    def act() -> None:
        assert lock.acquire(timeout=5)

    try:
        with forked(act):
            assert lock.locked()
    finally:
        over.set()
        holder.join()


def test_child_runs_its_reset_and_the_parent_does_not() -> None:
    class Owner:
        connections = 0

    owner = Owner()
    owner.connections = 3

    def forget(one: Owner) -> None:
        one.connections = 0

    renew_in_child(owner, forget)

    def act() -> None:
        assert owner.connections == 0

    with forked(act):
        assert owner.connections == 3


def test_child_runs_provider_calls_on_its_own_event_loop() -> None:
    loop = LoopThread()

    async def add(a: int, b: int) -> int:
        await asyncio.sleep(0)
        return a + b

    assert loop.submit(add(1, 2)).result(timeout=5) == 3

    def act() -> None:
        assert loop.submit(add(3, 4)).result(timeout=5) == 7

    with forked(act):
        assert [loop.submit(add(n, n)).result(timeout=5) for n in range(50)] == [2 * n for n in range(50)]
