"""structlog as JSON lines, with the eight keys that every line about a job has."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import structlog

from aijobs.causes import cause_of
from aijobs.errors import AijobsError
from aijobs.forks import new_lock

JOB_KEYS = (
    "jobId",
    "jobType",
    "queueName",
    "outboxId",
    "attemptNo",
    "durationMs",
    "lifecycleStatus",
    "errorCode",
)
"""The keys of every line about a job; null if a line has no value for one."""


_TELLTALES = ("sqlalchemy", "sqlalchemy.engine", "jieba", "openai", "httpx2", "httpcore2", "waitress")
"""Loggers that write rows, requests and answers below WARNING: user ids, content and keys. Never shown, whatever their
level: one of them reads its own from the environment (`OPENAI_LOG`), after ours is set.
"""


_SHARED: list[Any] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
]
_PROCESSORS = [*_SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter]
"""The same list at each configuration, because loggers keep the first one."""


def _is_fit_for_us(record: logging.LogRecord) -> bool:
    """Return whether a line may be logged."""
    if record.name == "waitress":  # At its limit of connections it writes a line for each that comes and goes.
        return record.levelno >= logging.WARNING and _WAITRESS.may_say(record.msg) is not None
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] not in _TELLTALES


def configure(level: str = "INFO", *, stream: Any = None) -> None:
    """Send our lines and the standard library's (Huey, SQLAlchemy, Flask) as JSON to `stream` (stderr)."""
    structlog.configure(
        processors=_PROCESSORS,
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(_is_fit_for_us)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(ensure_ascii=False),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _TELLTALES:
        logging.getLogger(name).setLevel(logging.WARNING)
    # The pool writes a stack for each lost connection; an outage has lines of its own.
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
    logging.getLogger("waitress.queue").setLevel(logging.CRITICAL)  # A line for each request that waits for a thread.


def get_logger(name: str) -> Any:
    """Return a structlog logger for the module `name`."""
    return structlog.stdlib.get_logger(name)


class LoggedJob(Protocol):
    """The fields of a job in a line."""

    id: str
    job_type: str
    queue_name: str
    attempt_no: int
    lifecycle_status: str
    error_code: str | None


def job_fields(job: LoggedJob | None = None, **known: Any) -> dict[str, Any]:
    """Return the eight keys: the job's values, replaced by `known` (camelCase names), otherwise null."""
    of_job = {} if job is None else _of_job(job)
    return {**dict.fromkeys(JOB_KEYS), **of_job, **known}


def _of_job(job: LoggedJob) -> dict[str, Any]:
    return {
        "jobId": job.id,
        "jobType": job.job_type,
        "queueName": job.queue_name,
        "attemptNo": job.attempt_no,
        "lifecycleStatus": job.lifecycle_status,
        "errorCode": job.error_code,
    }


def where(error: BaseException) -> list[str]:
    """Return the innermost six frames of an error, without its text, which may hold a statement's values."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]


def fault(error: BaseException) -> dict[str, str]:
    """Return an error's class as `error`, and `cause` if a database gave one. Never its text."""
    cause = cause_of(error)
    return {"error": type(error).__name__} | ({"cause": cause} if cause else {})


class Sparing:
    """Limits repeated lines to one a minute."""

    def __init__(self, every_s: float = 60.0, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._monotonic = every_s, monotonic
        self._guard = new_lock()
        self._said: dict[Hashable, float] = {}
        self._held_back: dict[Hashable, int] = {}

    def may_say(self, thing: Hashable) -> int | None:
        """Return how often `thing` was suppressed since its last line, if it may be logged now; otherwise None."""
        now = self._monotonic()
        with self._guard:
            said = self._said.get(thing)
            if said is not None and now - said < self._every_s:
                self._held_back[thing] = self._held_back.get(thing, 0) + 1
                return None
            self._forget_old(now)
            self._said[thing] = now
            return self._held_back.pop(thing, 0)

    def _forget_old(self, now: float) -> None:
        """Forget things that may be logged anyway, so that they don't accumulate."""
        for thing, at in list(self._said.items()):
            if now - at >= self._every_s and thing not in self._held_back:
                del self._said[thing]


_WAITRESS = Sparing()


class Outage:
    """Logs an outage: one warning at its start, then one a minute, and one line at its end."""

    def __init__(self, logger: Any, what: str, **fields: Any) -> None:
        """`fields` are in each of its lines."""
        self._logger, self._what, self._fields = logger, what, fields
        self._guard = new_lock()
        self._since: float | None = None
        self._last_said = 0.0

    def failed(self, error: BaseException) -> None:
        """Record a failure. Log it if nothing was logged within the last minute."""
        now = time.monotonic()
        with self._guard:
            first = self._since is None
            if first:
                self._since = now
            elif now - self._last_said < 60.0:
                return
            self._last_said = now
            seconds = int(now - (self._since or now))
        # The text of our own errors is safe; that of others may hold content.
        cause = {"cause": str(error)} if isinstance(error, AijobsError) else {}
        self._logger.warning(f"{self._what}.away", **self._fields, **fault(error), **cause, awaySeconds=seconds)

    def worked(self) -> None:
        """Record a success. Log it once after an outage."""
        with self._guard:
            if self._since is None:
                return
            seconds, self._since = int(time.monotonic() - self._since), None
        self._logger.info(f"{self._what}.back", awaySeconds=seconds, **self._fields)
