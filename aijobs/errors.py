"""All error codes: HTTP status, retry rule and texts.

`CODES` is the only table. An exception carries a code; nothing else depends on the exception's class. Prefixes group
codes, and give the default for a plug-in's code (`register_code`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any


class Retried(Enum):
    """How an attempt's error is retried, always within the definition's `max_retries`."""

    NEVER = "never"
    BACKOFF = "backoff"
    REPROMPT = "reprompt"
    """With backoff, and the next prompt names the faults."""
    ONCE = "once"
    """At most once per code and job, counted from the job's history; all `INTERNAL_*` codes of a job count as one."""
    BY_DEFINITION = "by_definition"
    """If the definition's abort strategy is `retry`."""


@dataclass(frozen=True)
class ErrorCode:
    """A code with its HTTP status (what an API answer with this code has), its retry rule and both messages."""

    code: str
    http: int
    retried: Retried
    en: str
    zh: str

    def message(self, language: str = "en") -> str:
        """The public message in `language`: `zh` for any Chinese, English for everything else."""
        return self.zh if language.startswith("zh") else self.en


def _api(code: str, http: int, en: str, zh: str) -> ErrorCode:
    return ErrorCode(code, http, Retried.NEVER, en, zh)


def _job(code: str, retried: Retried, en: str, zh: str) -> ErrorCode:
    return ErrorCode(code, 500, retried, en, zh)


_BUSY_EN = "The AI service is busy. We tried several times; please try again in a few minutes."
_BUSY_ZH = "AI 服务繁忙，我们已多次尝试，请几分钟后再试。"
_ODD_EN = "The AI's answer could not be used. Please try again."
_ODD_ZH = "AI 的回答无法使用，请重试。"
_OURS_EN = "Something went wrong on our side. It has been recorded; please try again later."
_OURS_ZH = "我们这边出了问题，已记录下来，请稍后再试。"

_TABLE = (
    # Answers of the API.
    _api("BAD_REQUEST", 400, "The request could not be read.", "无法读取该请求。"),
    _api("UNAUTHORIZED", 401, "Please sign in.", "请先登录。"),
    _api("FORBIDDEN", 403, "You may not do this.", "您无权进行此操作。"),
    _api("JOB_NOT_FOUND", 404, "There is no such job.", "没有这个任务。"),
    _api("NOT_FOUND", 404, "There is nothing here.", "这里什么都没有。"),
    _api("METHOD_NOT_ALLOWED", 405, "This address does not take that method.", "该地址不支持此方法。"),
    _api("JOB_NOT_CANCELLABLE", 409, "This job can't be cancelled.", "该任务不能取消。"),
    _api("JOB_ALREADY_CANCELLED", 409, "This job is cancelled already.", "该任务已经取消。"),
    _api("JOB_NOT_RETRYABLE", 409, "This job can't be retried.", "该任务不能重试。"),
    _api(
        "IDEMPOTENCY_KEY_REUSED",
        409,
        "This Idempotency-Key was used for another request. Use a new key.",
        "该 Idempotency-Key 已用于另一个请求，请换一个新的。",
    ),
    _api("PAYLOAD_TOO_LARGE", 413, "The request is too large.", "请求内容过大。"),
    _api("UNSUPPORTED_MEDIA_TYPE", 415, "Send application/json.", "请发送 application/json。"),
    _api("INPUT_INVALID", 422, "Some fields are not valid.", "有些字段不正确。"),
    _api("TOO_MANY_JOBS", 429, "Too many of your jobs are still waiting.", "您还有太多任务未完成。"),
    _api("QUOTA_EXCEEDED", 429, "This would go beyond your quota.", "该请求会超出您的额度。"),
    _api("RATE_LIMITED", 429, "Too many requests. Please wait a moment.", "请求过于频繁，请稍候。"),
    _api("PLATFORM_UNAVAILABLE", 503, "The AI service is unavailable right now.", "AI 服务暂时不可用。"),
    _api("SERVICE_BUSY", 503, "The service is busy. Please try again shortly.", "服务繁忙，请稍后再试。"),
    # Ends of attempts.
    _job("CANCELLED", Retried.NEVER, "This job was cancelled.", "该任务已取消。"),
    _job(
        "TIMEOUT",
        Retried.BY_DEFINITION,
        "The work took too long and was stopped.",
        "处理时间过长，任务已停止。",
    ),
    _job("PROVIDER_RATE_LIMITED", Retried.BACKOFF, _BUSY_EN, _BUSY_ZH),
    _job(
        "PROVIDER_UNAVAILABLE",
        Retried.BACKOFF,
        "The AI service can't be reached. We tried several times; please try again later.",
        "AI 服务无法连接，我们已多次尝试，请稍后再试。",
    ),
    _job("PROVIDER_TIMEOUT", Retried.BACKOFF, _BUSY_EN, _BUSY_ZH),
    _job("PROVIDER_STREAM_BROKEN", Retried.BACKOFF, _BUSY_EN, _BUSY_ZH),
    _job("PROVIDER_CONNECTION_LOST", Retried.ONCE, _BUSY_EN, _BUSY_ZH),
    _job("PROVIDER_EMPTY_OUTPUT", Retried.ONCE, _ODD_EN, _ODD_ZH),
    _job(
        "PROVIDER_ACCOUNT_EXHAUSTED",
        Retried.NEVER,
        "The AI service is unavailable right now. Please try again later.",
        "AI 服务暂时不可用，请稍后再试。",
    ),
    _job("VALIDATION_OUTPUT_NOT_JSON", Retried.REPROMPT, _ODD_EN, _ODD_ZH),
    _job("VALIDATION_OUTPUT_SCHEMA", Retried.REPROMPT, _ODD_EN, _ODD_ZH),
    _job("VALIDATION_OUTPUT_SEMANTICS", Retried.REPROMPT, _ODD_EN, _ODD_ZH),
    _job("VALIDATION_OUTPUT_TOO_LARGE", Retried.REPROMPT, _ODD_EN, _ODD_ZH),
    _job("VALIDATION_TRUNCATED", Retried.REPROMPT, _ODD_EN, _ODD_ZH),
    _job(
        "VALIDATION_INPUT_TOO_LARGE",
        Retried.NEVER,
        "Your notes are too long for one request. Please send a shorter part.",
        "您的笔记太长，请分段发送。",
    ),
    _job(
        "VALIDATION_NOTHING_TO_EXTRACT",
        Retried.NEVER,
        "Nothing in these notes could be turned into a card. Notes with definitions, terms and numbers work best.",
        "这些笔记里没有可以做成卡片的内容。含有定义、术语和数字的笔记效果最好。",
    ),
    _job(
        "CONTENT_SAFETY_BLOCKED",
        Retried.NEVER,
        "This content can't be processed.",
        "该内容无法处理。",
    ),
    _job(
        "CONTENT_SAFETY_SELF_HARM",
        Retried.NEVER,
        "We did not work on this text, as it may be about hurting yourself. You are not alone: please talk to someone "
        "you trust, or call your local emergency number or a crisis line now if you may be in danger.",
        "我们没有处理这段文字，因为它可能涉及伤害自己。您并不孤单：请和信任的人谈谈；如果您可能有危险，请立即拨打当地的急救电话或心理援助热线。",
    ),
    _job(
        "CONTENT_SAFETY_PROVIDER",
        Retried.NEVER,
        "The AI service declined to work on this content.",
        "AI 服务拒绝处理该内容。",
    ),
    _job(
        "CREDENTIAL_INVALID",
        Retried.NEVER,
        "Your own API key was refused. Please check or replace it in your settings.",
        "您自己的 API 密钥被拒绝，请在设置中检查或更换。",
    ),
    _job(
        "CREDENTIAL_PLATFORM_INVALID",
        Retried.NEVER,
        "The AI service is unavailable right now. Please try again later.",
        "AI 服务暂时不可用，请稍后再试。",
    ),
    _job(
        "CREDENTIAL_NOT_FOUND",
        Retried.NEVER,
        "The API key for this job is no longer there. Please add it again in your settings.",
        "该任务所用的 API 密钥已不存在，请在设置中重新添加。",
    ),
    ErrorCode(
        "CREDENTIAL_UNREADABLE",
        409,  # For a runtime service that asks for the key.
        Retried.NEVER,
        "Your own API key, as we keep it, can't be read any more. Please add it again in your settings.",
        "我们保存的您的 API 密钥已无法读取，请在设置中重新添加。",
    ),
    _job(
        "CREDENTIAL_INSUFFICIENT_BALANCE",
        Retried.NEVER,
        "Your own API key's account has no balance left. Please top it up.",
        "您自己的 API 密钥账户余额不足，请充值。",
    ),
    # Also for faults of the API itself.
    _job("INTERNAL_ERROR", Retried.ONCE, _OURS_EN, _OURS_ZH),
    _job("INTERNAL_PROJECTION", Retried.ONCE, _OURS_EN, _OURS_ZH),
    _job("INTERNAL_DATABASE", Retried.ONCE, _OURS_EN, _OURS_ZH),
    _job("INTERNAL_CONFIG", Retried.NEVER, _OURS_EN, _OURS_ZH),
    _job("INTERNAL_SNAPSHOT_MISSING", Retried.NEVER, _OURS_EN, _OURS_ZH),
    _job("INTERNAL_WORKER_LOST", Retried.NEVER, _OURS_EN, _OURS_ZH),
    _job("INTERNAL_NOT_DISPATCHED", Retried.NEVER, _OURS_EN, _OURS_ZH),
    _job("INTERNAL_UNKNOWN_JOB_TYPE", Retried.NEVER, _OURS_EN, _OURS_ZH),
)

CODES: dict[str, ErrorCode] = {}

_CODE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
MAX_MESSAGE = 500
"""Maximum characters of a job's public message."""
MAX_FAULTS, MAX_FAULT = 5, 500
MAX_RETRY_AFTER = timedelta(hours=1)
"""Maximum wait that a provider may ask for. Longer, the job would be forgotten."""

_PREFIX_DEFAULTS = (
    ("PROVIDER_", Retried.BACKOFF, _BUSY_EN, _BUSY_ZH),
    ("VALIDATION_", Retried.REPROMPT, _ODD_EN, _ODD_ZH),
    ("CONTENT_SAFETY_", Retried.NEVER, "This content can't be processed.", "该内容无法处理。"),
    (
        "CREDENTIAL_",
        Retried.NEVER,
        "Please check your own API key in your settings.",
        "请在设置中检查您自己的 API 密钥。",
    ),
    ("INTERNAL_", Retried.ONCE, _OURS_EN, _OURS_ZH),
)


def is_code(code: object) -> bool:
    """Return whether `code` has the form of a code, and so fits into its columns."""
    return isinstance(code, str) and _CODE.fullmatch(code) is not None


def register_code(code: ErrorCode) -> None:
    """Add a plug-in's code.

    `ValueError` if it doesn't have the form of one, a message is too long, or the code exists with another meaning.
    """
    if not is_code(code.code):
        raise ValueError(f"error code {code.code!r} does not match ^{_CODE.pattern}$")
    if not all(1 <= len(message) <= MAX_MESSAGE for message in (code.en, code.zh)):
        raise ValueError(f"error code {code.code} needs messages of 1–{MAX_MESSAGE} characters")
    if CODES.get(code.code, code) != code:
        raise ValueError(f"error code {code.code} is registered already")
    CODES[code.code] = code


for _entry in _TABLE:
    register_code(_entry)


def describe(code: str) -> ErrorCode:
    """Return the entry of `code`; for an unknown code its prefix's default, otherwise the rule of INTERNAL_ERROR."""
    if code in CODES:
        return CODES[code]
    for prefix, retried, en, zh in _PREFIX_DEFAULTS:
        if code.startswith(prefix):
            return ErrorCode(code, 500, retried, en, zh)
    return ErrorCode(code, 500, Retried.ONCE, _OURS_EN, _OURS_ZH)


def is_internal(code: str) -> bool:
    """Return whether `code` is of the group `INTERNAL_*`: by its name, or because nothing else is known of it."""
    if code.startswith("INTERNAL_"):
        return True
    return code not in CODES and not any(code.startswith(prefix) for prefix, *_ in _PREFIX_DEFAULTS)


class AijobsError(Exception):
    """The base of all errors that this package raises on purpose."""


class SettingsError(AijobsError):
    """A setting is missing or wrong. The text names it and says what to do."""


class ApiError(AijobsError):
    """A refused request: code, optional details (JSON) and, if known, when to try again."""

    def __init__(
        self,
        code: str,
        details: Mapping[str, Any] | None = None,
        retry_after: timedelta | None = None,
    ) -> None:
        super().__init__(code)
        self.code = code
        self.details = dict(details) if details else None
        self.retry_after = retry_after

    @property
    def http_status(self) -> int:
        return describe(self.code).http


class InputInvalid(ApiError):
    """422. `fields` is a list of (field path, fault)."""

    def __init__(self, fields: list[tuple[str, str]]) -> None:
        super().__init__("INPUT_INVALID", {"fields": [{"field": f, "message": m} for f, m in fields]})
        self._fields = fields

    def renamed(self, names: Mapping[str, str]) -> InputInvalid:
        """Return the same faults with the field names of the caller's request."""
        return InputInvalid([(names.get(field, field), fault) for field, fault in self._fields])

    def by_field(self) -> dict[str, str]:
        """Return the fault of each field, for a form."""
        return dict(self._fields)


def _storable(fault: object) -> str:
    """Return a fault that every database can store: it may quote a model."""
    text = str(fault)[:MAX_FAULT].replace("\x00", "\N{REPLACEMENT CHARACTER}")
    return text.encode("utf-8", "replace").decode()


class JobError(AijobsError):
    """An attempt failed. `internal` is for operators; `faults` are for the next prompt: five at most, each cut to 500
    characters. A `retry_after` of over an hour counts as an hour.
    """

    def __init__(
        self,
        code: str,
        internal: str = "",
        *,
        faults: tuple[str, ...] | list[str] = (),
        retry_after: timedelta | None = None,
    ) -> None:
        super().__init__(code, internal)
        self.code = code
        self.internal = internal
        self.faults = tuple(_storable(fault) for fault in tuple(faults)[:MAX_FAULTS])
        self.retry_after = None if retry_after is None else min(retry_after, MAX_RETRY_AFTER)


class BrokerUnavailable(AijobsError):
    """The broker can't be reached, or it refuses a command. Whether a message arrived is unknown.

    The text is the cause. `state`: `away`, `takes_no_writes`, `unsupported`, or `refused` if the broker refuses one key
    or command.
    """

    def __init__(self, cause: str, state: str = "away") -> None:
        super().__init__(cause)
        self.state = state
