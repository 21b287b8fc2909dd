"""The schedule of passes: when a pass is due, and what happens if it is slow or fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aijobs.queues.beat import LOG_EVERY_S, BeatScheduler, Every, FailureLog
from aijobs.queues.crew import Crew, Pass
from aijobs.queues.hueys import AiJobsHuey
from aijobs.settings import Settings
from tests.support.lines import captured_lines
from tests.support.polling import poll


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def beats(every: Every, clock: Clock, times: list[float]) -> list[float]:
    due = []
    for at in times:
        clock.now = 1000.0 + at
        if every(None):
            due.append(at)
    return due


def test_pass_is_due_at_once_and_then_each_period() -> None:
    clock = Clock()

    assert beats(Every(lambda: 10, clock), clock, [0, 1, 9, 10, 11, 19.5, 20]) == [0, 10, 20]


def test_scheduler_that_wakes_slightly_early_skips_no_run() -> None:
    clock = Clock()

    assert beats(Every(lambda: 1, clock), clock, [0, 0.999, 1.998, 3.001]) == [0, 0.999, 1.998, 3.001]


def test_runs_missed_during_sleep_are_not_repeated() -> None:
    clock = Clock()

    assert beats(Every(lambda: 10, clock), clock, [0, 100, 101, 102, 111]) == [0, 100, 111]


def test_failure_of_one_kind_is_logged_once_a_minute() -> None:
    clock = Clock()
    failures = FailureLog(clock)

    with captured_lines() as lines:
        for _ in range(50):
            failures.failed("reaper", ValueError("secret-canary"))
        failures.failed("reaper", KeyError("x"))
        failures.failed("dispatcher", ValueError("x"))
        clock.now += LOG_EVERY_S
        failures.failed("reaper", ValueError("secret-canary"))

        said = lines()

    assert [(line["event"], line["pass"], line["error"], line["alsoFailed"]) for line in said] == [
        ("pass.failed", "reaper", "ValueError", 0),
        ("pass.failed", "reaper", "KeyError", 0),
        ("pass.failed", "dispatcher", "ValueError", 0),
        ("pass.failed", "reaper", "ValueError", 49),
    ]
    assert "secret-canary" not in str(said)


@pytest.fixture
def start_beat() -> Iterator[Callable[..., None]]:
    """`start_beat(*passes)` runs a scheduler on a queue that has no broker."""
    stop, threads = threading.Event(), []

    def start(*passes: Pass) -> None:
        settings = Settings(redis_url="redis://127.0.0.1:1/0")
        queue = AiJobsHuey("ai-maintenance", lambda _: Crew(passes=passes), load_settings=lambda: settings)
        for one in passes:
            queue.add_pass(one.name)
        queue.gather_crew()
        scheduler = BeatScheduler(huey=queue, stop_flag=stop, interval=1, periodic=True)

        def run() -> None:
            while not stop.is_set():
                scheduler.loop()
            scheduler.shutdown()

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield start
    stop.set()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def test_passes_run_without_a_broker(start_beat: Callable[..., None]) -> None:
    ran: list[str] = []

    start_beat(Pass("dispatcher", 1, lambda: ran.append("d")), Pass("reaper", 30, lambda: ran.append("r")))

    poll(lambda: ran.count("d") >= 2, what="two beats of the dispatcher")
    assert ran.count("r") == 1


def test_slow_pass_never_overlaps_itself_and_delays_no_other(start_beat: Callable[..., None]) -> None:
    go_on, running, most, quick = threading.Event(), [], [], []

    def slow() -> None:
        running.append(1)
        most.append(len(running))
        go_on.wait(20)
        running.pop()

    start_beat(Pass("slow", 1, slow), Pass("quick", 1, lambda: quick.append(1)))
    poll(lambda: len(quick) >= 3, what="three quick passes beside a slow one")
    assert most == [1]

    go_on.set()
    poll(lambda: len(most) >= 2, what="the slow pass's next beat")
    assert max(most) == 1


def test_failed_pass_runs_again_at_the_next_period(start_beat: Callable[..., None]) -> None:
    tries: list[int] = []

    def breaks() -> None:
        tries.append(1)
        raise ValueError("secret-canary")

    with captured_lines() as lines:
        start_beat(Pass("breaks", 1, breaks))
        poll(lambda: len(tries) >= 3, what="three tries")
        said = lines()

    assert [(line["event"], line["error"]) for line in said] == [("pass.failed", "ValueError")]
    assert said[0]["where"][-1].endswith(" breaks")
    assert "secret-canary" not in str(said)


def test_crew_without_a_named_pass_is_refused() -> None:
    def build(_: Any) -> Crew:
        return Crew(passes=[Pass("dispatcher", 1, lambda: None)])

    queue = AiJobsHuey("ai-maintenance", build)
    queue.add_pass("dispatcher")
    queue.add_pass("reaper")

    with pytest.raises(Exception, match="reaper"):
        queue.gather_crew()
