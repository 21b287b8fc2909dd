"""What is said sparingly is said: each thing once a minute, and how often it was held back."""

from __future__ import annotations

from aijobs.logs import Sparing


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_thing_is_said_once_a_minute_with_how_often_it_came_up_unsaid() -> None:
    clock = Clock()
    sparing = Sparing(60, clock)
    assert [sparing.may_say("a") for _ in range(4)] == [0, None, None, None]
    assert sparing.may_say("b") == 0
    clock.now = 59.9
    assert sparing.may_say("a") is None
    clock.now = 60.0
    assert [sparing.may_say("a"), sparing.may_say("a")] == [4, None]


def test_odd_names_do_not_pile_up() -> None:
    clock = Clock()
    sparing = Sparing(60, clock)
    for number in range(1000):
        clock.now += 1
        assert sparing.may_say(f"name-{number}") == 0
    assert len(sparing._said) <= 61
