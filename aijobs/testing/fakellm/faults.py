"""All kinds of answers by name: the list for scripts, model names, the listing and the documentation.

A builder is a function: `faults.too_many_requests(retry_after_s=2)`. Its name in the list is used by scripts over HTTP
and by models called `fault:<name>`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, ParamSpec

from aijobs.testing.fakellm.answer import Answer, Step, Usage
from aijobs.testing.fakellm.request import Request
from aijobs.testing.fakellm.steps import HTML, Break, Drip, Hang, KeepAlive, Reply, Unless, Vanish

MODEL_PREFIX = "fault:"
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Fault:
    """An entry of the list. `build` takes the parameters that `params` names, all of them optional."""

    name: str
    description: str
    build: Callable[..., Step]

    @property
    def params(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.build).parameters)


FAULTS: dict[str, Fault] = {}


class UnknownFault(ValueError):
    """No entry has this name, or it takes no such parameter."""


def build(name: str, params: Mapping[str, Any] | None = None) -> Step:
    """Return the step of a JSON script. `UnknownFault`."""
    fault = FAULTS.get(name)
    if fault is None:
        raise UnknownFault(f"there is no fault {name!r}; GET / lists them")
    unknown = set(params or {}) - set(fault.params)
    if unknown:
        raise UnknownFault(
            f"{name} takes {', '.join(fault.params) or 'no parameters'}, not {', '.join(sorted(unknown))}"
        )
    try:
        return fault.build(**(params or {}))
    except (TypeError, ValueError) as error:
        raise UnknownFault(f"{name}: {error}") from None


def _enter(name: str, description: str, builder: Callable[P, Step]) -> Callable[P, Step]:
    @wraps(builder)
    def named(*args: P.args, **kwargs: P.kwargs) -> Step:
        return replace(builder(*args, **kwargs), name=name)

    FAULTS[name] = Fault(name, description, named)
    return named


def _listed(name: str, description: str) -> Callable[[Callable[P, Step]], Callable[P, Step]]:
    return lambda builder: _enter(name, description, builder)


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's format, which DeepSeek shares."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def vllm_body(message: str) -> dict[str, Any]:
    """Return a 400 in the flat format of vLLM and others."""
    return {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}


# --- good answers -------------------------------------------------------------------------------------------


@_listed("answer", "a good answer, made from the notes in the prompt; or the content and usage that are given")
def answer(
    content: str | None = None,
    usage: Usage | None = None,
    finish_reason: str | None = "stop",
    model: str | None = None,
    delta_s: float | None = None,
) -> Step:
    return Answer(
        content, usage="counted" if usage is None else usage, finish_reason=finish_reason, model=model, delta_s=delta_s
    )


@_listed("cache-hit", "a good answer whose prompt came mostly out of the provider's cache")
def cache_hit(share: float = 0.75) -> Step:
    return Answer(usage=partial(_from_cache, share))


def _from_cache(share: float, usage: Usage) -> Usage:
    prompt = usage["prompt_tokens"]
    cached = int(prompt * share)
    return {
        **usage,
        "prompt_tokens_details": {"cached_tokens": cached},
        "prompt_cache_hit_tokens": cached,
        "prompt_cache_miss_tokens": prompt - cached,
    }


# --- refusals -----------------------------------------------------------------------------------------------


@_listed("status", "any status with any JSON body")
def status(status: int = 500, body: Mapping[str, Any] | None = None, retry_after_s: float | None = None) -> Step:
    shown = error_body(f"pretended status {status}", "pretended_error") if body is None else body
    return Reply(status, shown, retry_after_s=retry_after_s)


@_listed("401", "the key is wrong")
def bad_key() -> Step:
    def body(request: Request) -> Mapping[str, Any]:
        shown = f"****{request.key[-4:]}"
        return error_body(
            f"Authentication Fails, Your api key: {shown} is invalid", "authentication_error", "invalid_request_error"
        )

    return Reply(401, body)


@_listed("402", "DeepSeek's account is empty")
def no_balance() -> Step:
    return Reply(402, error_body("Insufficient Balance", "unknown_error", "invalid_request_error"))


@_listed("403", "the key may not do this")
def forbidden() -> Step:
    return Reply(403, error_body("You are not allowed to sample from this model", "permission_error"))


@_listed("404", "no such model")
def unknown_model() -> Step:
    def body(request: Request) -> Mapping[str, Any]:
        message = f"The model `{request.model}` does not exist or you do not have access to it."
        return error_body(message, "invalid_request_error", "model_not_found")

    return Reply(404, body)


_enter("408", "the provider gave up waiting", partial(status, 408))
_enter("409", "a conflict on the provider's side", partial(status, 409))
_enter("422", "a parameter that the provider doesn't know", partial(status, 422))
_enter("425", "too early", partial(status, 425))


@_listed("429", "too many requests; with retry_after_s it says when, as_date as an HTTP date")
def too_many_requests(retry_after_s: float | None = None, as_date: bool = False) -> Step:
    body = error_body("Rate limit reached for requests", "requests", "rate_limit_exceeded")
    return Reply(429, body, retry_after_s=retry_after_s, as_date=as_date)


_enter("429-retry-after", "too many requests, try again in 2 s", partial(too_many_requests, retry_after_s=2.0))
_enter(
    "429-retry-after-date",
    "too many requests, with the time to try again as an HTTP date",
    partial(too_many_requests, retry_after_s=2.0, as_date=True),
)


@_listed("429-quota", "OpenAI's account is empty: a 429 that never gets better")
def insufficient_quota() -> Step:
    message = "You exceeded your current quota, please check your plan and billing details."
    return Reply(429, error_body(message, "insufficient_quota", "insufficient_quota"))


@_listed("500", "an error of the provider")
def server_error() -> Step:
    message = "The server had an error while processing your request. Sorry about that!"
    return Reply(500, error_body(message, "server_error"))


@_listed("502", "a gateway's page of HTML")
def bad_gateway() -> Step:
    return Reply(502, "<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>", HTML)


@_listed("503", "llama.cpp still loads its model; with retry_after_s it says when")
def loading_model(retry_after_s: float | None = None) -> Step:
    body = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    return Reply(503, body, retry_after_s=retry_after_s)


@_listed("529", "overloaded")
def overloaded() -> Step:
    return Reply(529, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}})


@_listed("content-exists-risk", "DeepSeek refuses the prompt for what it says: a 400")
def content_exists_risk() -> Step:
    return Reply(400, error_body("Content Exists Risk", "invalid_request_error", "invalid_request_error"))


@_listed("context-openai", "the prompt is too long, in OpenAI's words")
def context_openai() -> Step:
    message = (
        "This model's maximum context length is 128000 tokens. However, your messages resulted in 140003 tokens. "
        "Please reduce the length of the messages."
    )
    return Reply(400, error_body(message, "invalid_request_error", "context_length_exceeded", "messages"))


@_listed("context-deepseek", "the prompt is too long, in DeepSeek's words")
def context_deepseek() -> Step:
    message = (
        "This model's maximum context length is 131072 tokens. However, you requested 140003 tokens "
        "(131811 in the messages, 8192 in the completion). Please reduce the length of the messages or completion."
    )
    return Reply(400, error_body(message, "invalid_request_error", "invalid_request_error"))


@_listed("context-vllm", "the prompt is too long, in vLLM's words and shape")
def context_vllm() -> Step:
    message = "The decoder prompt (length 140003) is longer than the maximum model length of 131072."
    return Reply(400, vllm_body(message))


@_listed("no-json-schema", "json_schema is refused in DeepSeek's words, anything else answered well")
def no_json_schema() -> Step:
    message = "This response_format type is unavailable now"
    return Unless(("json_schema",), Reply(400, error_body(message, "invalid_request_error", "invalid_request_error")))


@_listed("no-response-format", "json_schema and json_object are refused in OpenAI's words, text is answered well")
def no_response_format() -> Step:
    def body(request: Request) -> Mapping[str, Any]:
        message = f"Invalid parameter: 'response_format' of type '{request.format}' is not supported with this model."
        return error_body(message, "invalid_request_error", None, "response_format")

    return Unless(("json_schema", "json_object"), Reply(400, body))


@_listed("no-response-format-vllm", "the same in vLLM's words and shape")
def no_response_format_vllm() -> Step:
    body = vllm_body("response_format is not supported by this engine: guided decoding is disabled")
    return Unless(("json_schema", "json_object"), Reply(400, body))


@_listed("redirect", "302 to another place, where a key must not follow")
def redirect(to: str = "/elsewhere/chat/completions", status: int = 302) -> Step:
    return Reply(status, "", HTML, {"Location": to})


@_listed("key-echo", "a 400 that repeats the key and the prompt")
def key_echo() -> Step:
    def body(request: Request) -> Mapping[str, Any]:
        message = f"Bad request with Authorization: Bearer {request.key}: {request.text()}"
        return error_body(message, "invalid_request_error")

    return Reply(400, body)


# --- late, in part, never -----------------------------------------------------------------------------------


@_listed("drip", "an event (or, without streaming, a byte) every every_s seconds")
def drip(every_s: float = 0.5) -> Step:
    return Drip(every_s)


@_listed("hang", "no answer at all")
def hang() -> Step:
    return Hang()


@_listed("hang-after-headers", "headers, and then nothing")
def hang_after_headers() -> Step:
    return Hang(after_headers=True)


@_listed("keep-alive", "signs of life for ever (or so many times, and then a good answer)")
def keep_alive(times: int | None = None, every_s: float = 0.2) -> Step:
    return KeepAlive(times, every_s)


_enter("keep-alive-answer", "three signs of life, and then a good answer", partial(keep_alive, times=3))


@_listed("stall", "half an answer, and then nothing")
def stall(after: float = 0.5) -> Step:
    return Break("stall", after)


@_listed("reset", "the connection is reset before the headers")
def reset() -> Step:
    return Vanish("reset")


@_listed("reset-mid-body", "the connection is reset in the middle of the answer")
def reset_mid_body(after: float = 0.5) -> Step:
    return Break("reset", after)


@_listed("close-after-work", "the work is done and billed, and the connection closed without an answer")
def close_after_work() -> Step:
    return Vanish("close", after_work=True)


@_listed("short-body", "the connection closes before all of the promised body has come")
def short_body(after: float = 0.5) -> Step:
    return Break("close", after)


@_listed("cut-stream", "the body ends properly in the middle of the answer, with no finish_reason and no [DONE]")
def cut_stream(after: float = 0.5) -> Step:
    return Break("end", after)


@_listed("error-event", "an error event in the middle of the stream (without streaming: instead of the answer)")
def error_event(after: float = 0.5) -> Step:
    return Break("error", after)


# --- answers that can't be used -----------------------------------------------------------------------------


@_listed("html", "a page of HTML with status 200")
def html() -> Step:
    return Reply(200, "<!doctype html><title>Sign in to the network</title>", HTML)


@_listed("wrong-shape", "JSON with status 200 that is no completion")
def wrong_shape(body: Mapping[str, Any] | None = None) -> Step:
    return Reply(200, {"ok": True, "data": []} if body is None else body)


@_listed("blank", "spaces with finish_reason stop: what DeepSeek says when it can't")
def blank() -> Step:
    return Answer(" " * 60)


@_listed("prose", "friendly words instead of JSON")
def prose() -> Step:
    return Answer("Sure! Here are some flashcards that I made for you. Let me know whether you like them.")


@_listed("truncated", "cut off at the token limit in the middle of a word")
def truncated(keep: float = 0.6) -> Step:
    return Answer(change=lambda text: text[: int(len(text) * keep)], finish_reason="length")


@_listed("truncated-valid", "cut off at the token limit, and yet JSON, with fewer items")
def truncated_valid() -> Step:
    return Answer(change=_fewer_items, finish_reason="length")


@_listed("fenced", "a good answer in a code fence")
def fenced() -> Step:
    return Answer(change=lambda text: f"```json\n{text}\n```")


@_listed("think", "a good answer after a think block in its content")
def think() -> Step:
    return Answer(change=lambda text: f"<think>\nThe notes say {{a lot}}.\n</think>\n\n{text}")


@_listed("reasoning", "a good answer after its thoughts, in reasoning_content")
def reasoning() -> Step:
    return Answer(reasoning="The learner wants cards. I read the notes, and choose what matters in them.")


@_listed("nan", "JSON with NaN in it")
def nan() -> Step:
    return Answer(change=lambda text: _with_member(text, '"score": NaN'))


@_listed("duplicate-keys", "JSON that says the same key twice")
def duplicate_keys() -> Step:
    return Answer(change=lambda text: _with_member(_with_member(text, '"note": 1'), '"note": 2'))


@_listed("lone-surrogate", "JSON with half of a surrogate pair, as an escape in the content")
def lone_surrogate() -> Step:
    return Answer(change=lambda text: _with_member(text, r'"note": "\ud83d"'))


@_listed("split-surrogate", "an emoji of which a delta holds one half and the next the other")
def split_surrogate() -> Step:
    return Answer('{"note": "' + "\ud83d\ude00" * 8 + '"}', delta_chars=1)


@_listed("nul", "JSON with a NUL character")
def nul() -> Step:
    return Answer(change=lambda text: _with_member(text, r'"note": "\u0000"'))


@_listed("invalid-utf8", "bytes that are no UTF-8")
def invalid_utf8() -> Step:
    return Answer('{"note": "\udcff\udcfe"}')


@_listed("huge", "an answer of so many megabytes")
def huge(megabytes: float = 2) -> Step:
    return Answer('{"cards": "' + "x" * int(megabytes * 1_000_000) + '"}', delta_chars=16_384)


@_listed("white-space", "white space without end under a grammar, until the token limit")
def white_space(characters: int = 20_000) -> Step:
    return Answer('{"cards": [' + "\n  " * (characters // 3), finish_reason="length", delta_chars=300)


@_listed("no-finish-reason", "a whole answer that doesn't say why it ended")
def no_finish_reason() -> Step:
    return Answer(finish_reason=None)


@_listed("insufficient-system-resource", "DeepSeek breaks off for want of machines")
def insufficient_system_resource() -> Step:
    return Answer(change=lambda text: text[: len(text) // 2], finish_reason="insufficient_system_resource")


@_listed("content-filter", "filtered: status 200, and null in the place of the message")
def content_filter() -> Step:
    return Answer("", no_message=True, finish_reason="content_filter")


@_listed("partial-content-filter", "half an answer, and then filtered")
def partial_content_filter() -> Step:
    return Answer(change=lambda text: text[: len(text) // 2], finish_reason="content_filter")


@_listed("refusal", "the model refuses, in the field for it")
def refusal() -> Step:
    return Answer("", refusal="I'm sorry, I can't help with that.")


@_listed("no-usage", "a good answer without usage")
def no_usage() -> Step:
    return Answer(usage=None)


@_listed("negative-usage", "usage below zero")
def negative_usage() -> Step:
    return Answer(usage={"prompt_tokens": -5, "completion_tokens": -7, "total_tokens": -12})


@_listed("huge-usage", "usage of 10^30 tokens")
def huge_usage() -> Step:
    return Answer(usage={"prompt_tokens": 10**30, "completion_tokens": 10**30, "total_tokens": 2 * 10**30})


@_listed("cached-over-prompt", "usage with more cached tokens than the prompt has")
def cached_over_prompt() -> Step:
    details = {"prompt_tokens_details": {"cached_tokens": 5000}, "prompt_cache_hit_tokens": 5000}
    return Answer(usage={"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150, **details})


@_listed("other-model", "a good answer that names another model than was asked for")
def other_model(model: str = "dev-1-2026-01-31") -> Step:
    return Answer(model=model)


def _fewer_items(text: str) -> str:
    """Return the JSON object with the first half of its first list; a text without a list unchanged."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    for name, items in value.items() if isinstance(value, dict) else ():
        if isinstance(items, list):
            return json.dumps({**value, name: items[: len(items) // 2]}, ensure_ascii=False)
    return text


def _with_member(text: str, member: str) -> str:
    """Return the JSON object with one more member at its end, which need not be valid."""
    inside = text.rstrip().removesuffix("}")
    return f"{inside}{'' if inside.strip() == '{' else ', '}{member}}}"


def as_text() -> str:
    """Return the list as text, one line each."""
    width = max(len(name) for name in FAULTS) + 2
    lines = [f"{fault.name:<{width}}{fault.description}" for fault in FAULTS.values()]
    return "\n".join([f"A model called {MODEL_PREFIX}<name> answers in that way.", "", *lines, ""])
