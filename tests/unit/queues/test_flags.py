"""What of a consumer's options was on the command line, and what Huey filled in."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pytest
from huey.consumer_options import ConsumerConfig, OptionParserHandler
from hypothesis import given
from hypothesis import strategies as st

from aijobs.errors import SettingsError
from aijobs.queues.flags import MAX_DELAY_S, fit_options
from aijobs.settings import Settings

SETTINGS = Settings()


def options_of(*line: str) -> dict[str, Any]:
    """What Huey hands to `create_consumer` for this command line, as its own program puts it together."""
    found = vars(OptionParserHandler().get_option_parser().parse_args(list(line))[0])
    values: dict[str, Any] = ConsumerConfig(**{name: v for name, v in found.items() if v is not None}).values
    return values


@pytest.mark.parametrize(
    ("line", "workers"),
    [
        ((), 2),
        (("-w", "1"), 1),
        (("-w1",), 1),
        (("--workers", "1"), 1),
        (("--workers=1",), 1),
        (("-v", "-d", "1"), 2),
        (("-w", "7", "-w", "3"), 3),
    ],
)
def test_threads_that_are_left_out_are_the_policys(
    monkeypatch: pytest.MonkeyPatch, line: tuple[str, ...], workers: int
) -> None:
    monkeypatch.setattr("sys.argv", ["huey_consumer", *line, "aijobs.workers.interactive"])
    fitted = fit_options(options_of(*line), SETTINGS, workers=2, passes=False)
    assert fitted["workers"] == workers
    assert set(fitted) == set(options_of())


@pytest.mark.parametrize("line", [["pytest", "-q"], ["x", "-h"], ["x", "-w", "many"], ["x", "-w", "9"], ["x"]])
def test_options_that_are_not_of_this_command_line_all_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: list[str]
) -> None:
    monkeypatch.setattr("sys.argv", line)
    assert fit_options({"workers": 1}, SETTINGS, workers=2, passes=False)["workers"] == 1
    assert fit_options({}, SETTINGS, workers=2, passes=False)["workers"] == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("-k", "process"), "only threads are supported"),
        (("-k", "greenlet"), "only threads are supported"),
        (("-w", "0"), "-w 0: it is 1 or more"),
        (("--workers=-1",), "-w -1: it is 1 or more"),
        (("-d", "0"), "-d 0: it is 0.001 or more"),
        (("-d", "-1"), "-d -1: it is 0.001 or more"),
        (("-d", "nan"), "-d nan: it is 0.001 or more"),
        (("-m", "-3"), "-m -3: it is 0.001 or more"),
        (("-b", "inf"), "-b inf: it is 1 or more"),
        (("-c", "-1"), "-c -1: it is 0.1 or more"),
        (("-C",), "leave -C out"),
        (("-M", "0"), "-M 0: it is 1 or more"),
        (("-t", "-1"), "-t -1: it is 0 or more"),
        (("-t", "inf"), "-t inf: it is 0 or more"),
        (("-n",), "leave -n out"),
        (("--no-periodic",), "leave -n out"),
    ],
)
def test_an_option_that_makes_a_consumer_useless_is_refused(
    monkeypatch: pytest.MonkeyPatch, line: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr("sys.argv", ["huey_consumer", *line, "aijobs.workers.maintenance"])
    with pytest.raises(SettingsError, match=said):
        fit_options(options_of(*line), SETTINGS, workers=2, passes=True)


NUMBERS = ("workers", "initial_delay", "max_delay", "backoff", "health_check_interval", "max_tasks", "shutdown_timeout")


@given(st.sampled_from(NUMBERS), st.floats() | st.integers(-5, 5))
def test_a_number_that_is_taken_is_one_that_a_consumer_works_with(name: str, value: float) -> None:
    with suppress(SettingsError):
        fitted = fit_options({name: value}, SETTINGS, workers=2, passes=True)
        assert math.isfinite(value)
        assert value > 0 or (name, value) == ("shutdown_timeout", 0)
        assert fitted["max_delay"] <= MAX_DELAY_S
