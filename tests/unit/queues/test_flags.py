"""Which consumer options were on the command line, and which are Huey's defaults."""

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
    """Return the options that Huey passes to `create_consumer` for this command line."""
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
def test_number_of_threads_defaults_to_the_policy(
    monkeypatch: pytest.MonkeyPatch, line: tuple[str, ...], workers: int
) -> None:
    monkeypatch.setattr("sys.argv", ["huey_consumer", *line, "aijobs.workers.interactive"])
    fitted = fit_options(options_of(*line), SETTINGS, workers=2, passes=False)
    assert fitted["workers"] == workers
    assert set(fitted) == set(options_of())


@pytest.mark.parametrize("line", [["pytest", "-q"], ["x", "-h"], ["x", "-w", "many"], ["x", "-w", "9"], ["x"]])
def test_options_count_if_the_command_line_is_another_programs(
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
def test_option_that_makes_a_consumer_useless_is_refused(
    monkeypatch: pytest.MonkeyPatch, line: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr("sys.argv", ["huey_consumer", *line, "aijobs.workers.maintenance"])
    with pytest.raises(SettingsError, match=said):
        fit_options(options_of(*line), SETTINGS, workers=2, passes=True)


NUMBERS = ("workers", "initial_delay", "max_delay", "backoff", "health_check_interval", "max_tasks", "shutdown_timeout")


@given(st.sampled_from(NUMBERS), st.floats() | st.integers(-5, 5))
def test_accepted_number_is_usable_by_a_consumer(name: str, value: float) -> None:
    with suppress(SettingsError):
        fitted = fit_options({name: value}, SETTINGS, workers=2, passes=True)
        assert math.isfinite(value)
        assert value > 0 or (name, value) == ("shutdown_timeout", 0)
        assert fitted["max_delay"] <= MAX_DELAY_S
