"""Check the options of Huey's command line, and fill in our defaults."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from huey.consumer_options import ConsumerConfig, OptionParserHandler

from aijobs.errors import SettingsError
from aijobs.settings import Settings

MAX_DELAY_S = 2.0
"""Maximum sleep between two tries while the broker is away."""

_AT_LEAST = {
    "workers": ("-w", 1),
    "initial_delay": ("-d", 0.001),
    "max_delay": ("-m", 0.001),
    "backoff": ("-b", 1),
    "health_check_interval": ("-c", 0.1),
    "max_tasks": ("-M", 1),
    "shutdown_timeout": ("-t", 0),
}
"""Each option's flag, and the smallest value with which a consumer works. Seconds, or a count."""


def fit_options(options: Mapping[str, Any], settings: Settings, *, workers: int, passes: bool) -> dict[str, Any]:
    """Return Huey's options with our defaults. `SettingsError` for one that makes a consumer useless.

    `workers`: threads of a consumer without `-w`. `passes`: whether it runs periodic tasks. A graceful SIGTERM is
    fixed, and the back-off limited.
    """
    given = flags_given(options)
    _refuse_useless(given, passes=passes)
    grace_s = given.get("shutdown_timeout")
    return {
        **options,
        "workers": given.get("workers", workers),
        "graceful_signal": "TERM",
        "shutdown_timeout": settings.shutdown_grace_s if grace_s is None else grace_s,
        "max_delay": min(given.get("max_delay", MAX_DELAY_S), MAX_DELAY_S),
        "scheduler_interval": 1,
        "flush_locks": False,
        "extra_locks": None,
    }


def flags_given(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options without Huey's own defaults.

    Huey hands on defaults and flags alike. Its own parser leaves out what is not on the command line, so parse this
    process's command line again. If that doesn't give these options, they came from elsewhere and all count as given.
    """
    parser = OptionParserHandler().get_option_parser()
    parser.remove_option("-h")
    parser.error = _no_command_line_of_huey
    try:
        found = vars(parser.parse_args(sys.argv[1:])[0])
    except ValueError:
        return options
    on_line = {name: value for name, value in found.items() if value is not None}
    if ConsumerConfig(**on_line).values != dict(options):
        return options
    return {name: value for name, value in on_line.items() if name in options}


def _no_command_line_of_huey(message: str) -> NoReturn:
    raise ValueError(message)


def _refuse_useless(given: Mapping[str, Any], *, passes: bool) -> None:
    if given.get("worker_type", "thread") != "thread":
        raise SettingsError(f"-k {given['worker_type']}: only threads are supported; leave -k out")
    if passes and not given.get("periodic", True):
        raise SettingsError("-n: this queue is nothing but periodic tasks; leave -n out")
    if not given.get("check_worker_health", True):
        raise SettingsError("-C: a worker thread that ends would not be replaced; leave -C out")
    for name, (flag, least) in _AT_LEAST.items():
        value = given.get(name)
        if value is not None and not (value >= least and math.isfinite(value)):
            raise SettingsError(f"{flag} {value:g}: it is {least:g} or more")
