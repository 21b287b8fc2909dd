"""Each fault of the fake provider behaves on the wire as described."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from typing import Any

import pytest

from aijobs.ai.output import read_answer
from aijobs.clock import utc_now
from aijobs.errors import JobError
from aijobs.job_types.flashcard_generation import Output
from aijobs.testing.fakellm import Answer, FakeLlm, faults
from tests.contracts import documents
from tests.unit.testing.prompts import flashcard_request
from tests.unit.testing.wire import Seen, ask, read_completion

KEY = "sk-canary-0123456789"
Check = Callable[[FakeLlm, bool], None]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeLlm]:
    with FakeLlm(cache_dir=tmp_path_factory.mktemp("fakellm")) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _as_new(llm: FakeLlm) -> None:
    llm.forget()


def request(name: str, stream: bool) -> dict[str, Any]:
    options = {"stream": stream, "stream_options": {"include_usage": True}}
    return {**flashcard_request(), "model": f"fault:{name}", **options}


def call(llm: FakeLlm, name: str, stream: bool, **more: Any) -> Seen:
    return ask(llm.url, {**request(name, stream), **more}, key=KEY)


def complete(llm: FakeLlm, name: str, stream: bool) -> Seen:
    seen = call(llm, name, stream)
    assert (seen.status, seen.end, seen.whole) == (200, "closed", True)
    assert not stream or seen.body.endswith(b"data: [DONE]\n\n")
    return read_completion(seen, stream=stream)


def cards_of(content: str, finish_reason: str = "stop") -> list[Any]:
    return Output.model_validate(read_answer(content, finish_reason)).cards


# --- expectations -------------------------------------------------------------------------------------------


def refused(name: str, status: int, *words: str, retry_after: bool = False) -> Check:
    def check(llm: FakeLlm, stream: bool) -> None:
        seen = call(llm, name, stream)
        assert (seen.status, seen.end, seen.whole) == (status, "closed", True)
        assert all(word in seen.body.decode() for word in words)
        assert (seen.header("Retry-After") is not None) == retry_after
        assert llm.calls[-1].usage is None

    return check


def good(name: str, look: Callable[[Seen], object] = lambda seen: True) -> Check:
    """Expect a usable answer with flashcards of the notes that also satisfies `look`."""

    def check(llm: FakeLlm, stream: bool) -> None:
        seen = complete(llm, name, stream)
        assert cards_of(seen.content)
        assert seen.finish_reason == "stop"
        assert look(seen)

    return check


def bad(name: str, code: str, finish_reason: str = "stop", look: Callable[[Seen], object] = lambda seen: True) -> Check:
    """Expect a completion that our reader refuses with `code`."""

    def check(llm: FakeLlm, stream: bool) -> None:
        seen = complete(llm, name, stream)
        assert seen.finish_reason == finish_reason
        assert look(seen)
        with pytest.raises(JobError) as refusal:
            read_answer(seen.content, finish_reason)
        assert refusal.value.code == code

    return check


def never(name: str, come: Callable[[bytes, bool], bool], *, quiet: bool = True) -> Check:
    """Expect an answer that goes on after `come` is true."""

    def check(llm: FakeLlm, stream: bool) -> None:
        seen = ask(
            llm.url,
            request(name, stream),
            until=lambda raw: bool(llm.calls) and come(raw, stream),
            then_quiet=quiet,
        )
        assert seen.end == "open"
        assert b"[DONE]" not in seen.raw
        assert not (seen.raw and not seen.chunked and seen.whole)
        llm.wait_until_left()

    return check


def parted(name: str, end: str, *, whole: bool) -> Check:
    """Expect a part of an answer without its proper end."""

    def check(llm: FakeLlm, stream: bool) -> None:
        seen = call(llm, name, stream)
        assert (seen.status, seen.end, seen.whole) == (200, end, whole)
        assert seen.body.startswith(b"data: {" if stream else b"{")
        assert b"finish_reason" not in seen.body or b'"finish_reason": "stop"' not in seen.body
        assert b"[DONE]" not in seen.body
        usage = llm.wait_for_calls(1, ended=True)[0].usage
        assert usage is not None
        assert usage["completion_tokens"] > 0

    return check


def gone(name: str, end: str, *, billed: bool) -> Check:
    """Expect no byte at all."""

    def check(llm: FakeLlm, stream: bool) -> None:
        seen = call(llm, name, stream)
        assert (seen.raw, seen.end) == (b"", end)
        (entry,) = llm.wait_for_calls(1, ended=True)
        assert (entry.status, entry.usage is not None) == (None, billed)

    return check


# --- special cases ------------------------------------------------------------------------------------------


def retry_after_seconds(llm: FakeLlm, stream: bool) -> None:
    assert call(llm, "429-retry-after", stream).header("Retry-After") == "2"


def retry_after_date(llm: FakeLlm, stream: bool) -> None:
    seen = call(llm, "429-retry-after-date", stream)
    at = parsedate_to_datetime(seen.header("Retry-After") or "")
    assert seen.status == 429
    assert abs((at - utc_now()).total_seconds()) < 60


def refuses_a_schema_alone(llm: FakeLlm, stream: bool) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "cards", "schema": Output.model_json_schema()}}
    assert call(llm, "no-json-schema", stream, response_format=schema).status == 400
    assert cards_of(complete(llm, "no-json-schema", stream).content)


def refuses_any_format(name: str, mark: str) -> Check:
    def check(llm: FakeLlm, stream: bool) -> None:
        seen = call(llm, name, stream)
        assert seen.status == 400
        assert mark in seen.json()
        assert "response_format" in seen.body.decode()
        assert call(llm, name, stream, response_format={"type": "text"}).status == 200

    return check


def leads_elsewhere(llm: FakeLlm, stream: bool) -> None:
    seen = call(llm, "redirect", stream)
    assert (seen.status, seen.header("Location")) == (302, "/elsewhere/chat/completions")


def echoes(llm: FakeLlm, stream: bool) -> None:
    seen = call(llm, "key-echo", stream)
    assert seen.status == 400
    assert KEY in seen.body.decode()
    assert "Osmosis is the movement" in seen.body.decode()


def wakes_up(llm: FakeLlm, stream: bool) -> None:
    seen = call(llm, "keep-alive-answer", stream)
    alive = b": keep-alive\n\n" if stream else b"\n"
    assert seen.body.startswith(3 * alive)
    assert cards_of(read_completion(seen, stream=stream).content)


def tells_of_an_error(llm: FakeLlm, stream: bool) -> None:
    seen = call(llm, "error-event", stream)
    assert (seen.status, seen.whole) == (200, True)
    if stream:
        *before, last = read_completion(seen, stream=True).events
        assert before
        assert "server_error" in json.dumps(last["error"])
        assert seen.finish_reason is None
    else:
        assert seen.json()["error"]["type"] == "server_error"


def says_html(llm: FakeLlm, stream: bool) -> None:
    seen = call(llm, "html", stream)
    assert (seen.status, seen.header("Content-Type")) == (200, "text/html; charset=utf-8")
    assert seen.body.startswith(b"<!doctype html>")


def has_another_shape(llm: FakeLlm, stream: bool) -> None:
    seen = call(llm, "wrong-shape", stream)
    assert (seen.status, "choices" in seen.json()) == (200, False)


def is_no_text(llm: FakeLlm, stream: bool) -> None:
    seen = call(llm, "invalid-utf8", stream)
    assert b"\xff" in seen.body
    with pytest.raises(UnicodeDecodeError):
        seen.body.decode()


def splits_an_emoji(llm: FakeLlm, stream: bool) -> None:
    seen = call(llm, "split-surrogate", stream)
    joined = read_completion(seen, stream=stream).content.encode("utf-16", "surrogatepass").decode("utf-16")
    assert read_answer(joined, "stop") == {"note": "😀" * 8}
    assert not stream or b'"content": "\\ud83d"' in seen.body


def ends_for_no_reason(llm: FakeLlm, stream: bool) -> None:
    seen = complete(llm, "no-finish-reason", stream)
    assert seen.finish_reason is None
    assert cards_of(seen.content)


def has_no_message(llm: FakeLlm, stream: bool) -> None:
    seen = complete(llm, "content-filter", stream)
    assert seen.finish_reason == "content_filter"
    assert seen.events[0]["choices"][0]["delta" if stream else "message"] is None


def refuses_in_its_field(llm: FakeLlm, stream: bool) -> None:
    seen = complete(llm, "refusal", stream)
    assert (seen.content, seen.finish_reason) == ("", "stop")
    assert seen.refusal.startswith("I'm sorry")


def half_of_it(name: str, finish_reason: str) -> Check:
    def check(llm: FakeLlm, stream: bool) -> None:
        seen = complete(llm, name, stream)
        assert (seen.content[:10], seen.finish_reason) == ('{"cards": ', finish_reason)
        with pytest.raises(json.JSONDecodeError):
            json.loads(seen.content)

    return check


def any_status(llm: FakeLlm, stream: bool) -> None:
    assert call(llm, "status", stream).status == 500
    llm.script(faults.status(418, {"tea": True}, retry_after_s=1.5))
    seen = ask(llm.url, {**flashcard_request(), "stream": stream})
    assert (seen.status, seen.json(), seen.header("Retry-After")) == (418, {"tea": True}, "1.5")


def _grew(raw: bytes, stream: bool) -> bool:
    return raw.count(b"keep-alive" if stream else b"\r\n\n\r\n") >= 3


def _began(raw: bytes, stream: bool) -> bool:
    return raw.partition(b"\r\n\r\n")[2] != b""


EXPECTED: dict[str, Check] = {
    "answer": good("answer", lambda seen: seen.usage["prompt_tokens"] > 100 and seen.usage["completion_tokens"] > 50),
    "cache-hit": good(
        "cache-hit",
        lambda seen: (
            seen.usage["prompt_cache_hit_tokens"] > 0
            and seen.usage["prompt_cache_hit_tokens"] + seen.usage["prompt_cache_miss_tokens"]
            == seen.usage["prompt_tokens"]
            and seen.usage["prompt_tokens_details"]["cached_tokens"] == seen.usage["prompt_cache_hit_tokens"]
        ),
    ),
    "status": any_status,
    "401": refused("401", 401, "Authentication Fails", "****6789"),
    "402": refused("402", 402, "Insufficient Balance"),
    "403": refused("403", 403, "not allowed"),
    "404": refused("404", 404, "model_not_found"),
    "408": refused("408", 408),
    "409": refused("409", 409),
    "422": refused("422", 422),
    "425": refused("425", 425),
    "429": refused("429", 429, "rate_limit_exceeded"),
    "429-retry-after": retry_after_seconds,
    "429-retry-after-date": retry_after_date,
    "429-quota": refused("429-quota", 429, "insufficient_quota"),
    "500": refused("500", 500, "server_error"),
    "502": refused("502", 502, "<html>"),
    "503": refused("503", 503, "Loading model"),
    "529": refused("529", 529, "overloaded_error"),
    "content-exists-risk": refused("content-exists-risk", 400, "Content Exists Risk"),
    "context-openai": refused("context-openai", 400, "context_length_exceeded"),
    "context-deepseek": refused("context-deepseek", 400, "maximum context length is 131072"),
    "context-vllm": refused("context-vllm", 400, "maximum model length", '"object": "error"'),
    "no-json-schema": refuses_a_schema_alone,
    "no-response-format": refuses_any_format("no-response-format", "error"),
    "no-response-format-vllm": refuses_any_format("no-response-format-vllm", "object"),
    "redirect": leads_elsewhere,
    "key-echo": echoes,
    "drip": never("drip", _began),
    "hang": never("hang", lambda raw, stream: raw == b""),
    "hang-after-headers": never("hang-after-headers", lambda raw, stream: raw.endswith(b"\r\n\r\n")),
    "keep-alive": never("keep-alive", _grew, quiet=False),
    "keep-alive-answer": wakes_up,
    "stall": never("stall", lambda raw, stream: raw.count(b"data: " if stream else b"card_type") >= 1),
    "reset": gone("reset", "reset", billed=False),
    "reset-mid-body": parted("reset-mid-body", "reset", whole=False),
    "close-after-work": gone("close-after-work", "closed", billed=True),
    "short-body": parted("short-body", "closed", whole=False),
    "cut-stream": parted("cut-stream", "closed", whole=True),
    "error-event": tells_of_an_error,
    "html": says_html,
    "wrong-shape": has_another_shape,
    "blank": bad("blank", "PROVIDER_EMPTY_OUTPUT", look=lambda seen: seen.content.isspace()),
    "prose": bad("prose", "VALIDATION_OUTPUT_NOT_JSON"),
    "truncated": bad("truncated", "VALIDATION_TRUNCATED", "length", lambda seen: not seen.content.endswith("}")),
    "truncated-valid": bad(
        "truncated-valid", "VALIDATION_TRUNCATED", "length", lambda seen: len(json.loads(seen.content)["cards"]) == 1
    ),
    "fenced": good("fenced", lambda seen: seen.content.startswith("```json\n")),
    "think": good("think", lambda seen: seen.content.startswith("<think>")),
    "reasoning": good("reasoning", lambda seen: "I read the notes" in seen.reasoning),
    "nan": bad("nan", "VALIDATION_OUTPUT_NOT_JSON", look=lambda seen: '"score": NaN' in seen.content),
    "duplicate-keys": bad(
        "duplicate-keys", "VALIDATION_OUTPUT_NOT_JSON", look=lambda s: s.content.count('"note"') == 2
    ),
    "lone-surrogate": bad("lone-surrogate", "VALIDATION_OUTPUT_NOT_JSON", look=lambda s: r"\ud83d" in s.content),
    "split-surrogate": splits_an_emoji,
    "nul": bad("nul", "VALIDATION_OUTPUT_NOT_JSON", look=lambda seen: r"\u0000" in seen.content),
    "invalid-utf8": is_no_text,
    "huge": bad("huge", "VALIDATION_OUTPUT_TOO_LARGE", look=lambda seen: len(seen.content) > 2_000_000),
    "white-space": bad("white-space", "VALIDATION_TRUNCATED", "length", lambda seen: seen.content[11:].isspace()),
    "no-finish-reason": ends_for_no_reason,
    "insufficient-system-resource": half_of_it("insufficient-system-resource", "insufficient_system_resource"),
    "content-filter": has_no_message,
    "partial-content-filter": half_of_it("partial-content-filter", "content_filter"),
    "refusal": refuses_in_its_field,
    "no-usage": good("no-usage", lambda seen: seen.usage is None),
    "negative-usage": good("negative-usage", lambda seen: seen.usage["prompt_tokens"] < 0),
    "huge-usage": good("huge-usage", lambda seen: seen.usage["total_tokens"] > 2**64),
    "cached-over-prompt": good(
        "cached-over-prompt", lambda seen: seen.usage["prompt_cache_hit_tokens"] > seen.usage["prompt_tokens"]
    ),
    "other-model": good("other-model", lambda seen: seen.events[0]["model"] == "dev-1-2026-01-31"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_fault_behaves_on_the_wire_as_described(llm: FakeLlm, name: str, stream: bool) -> None:
    EXPECTED[name](llm, stream)
    assert all(entry.step == name for entry in llm.calls if entry.model.startswith("fault:"))


def test_every_fault_has_an_expectation() -> None:
    assert set(EXPECTED) == set(faults.FAULTS)


def test_documentation_lists_every_fault() -> None:
    rows = documents.rows(documents.read("docs/dev-llm.md"))
    written = [tuple(row) for row in rows if row[0].strip("`") in faults.FAULTS]
    there = [
        (f"`{fault.name}`", fault.description, ", ".join(f"`{name}`" for name in fault.params))
        for fault in faults.FAULTS.values()
    ]
    assert written == there


def test_unknown_fault_or_parameter_is_named() -> None:
    with pytest.raises(faults.UnknownFault, match="no fault 'nonsense'"):
        faults.build("nonsense")
    with pytest.raises(faults.UnknownFault, match="429 takes retry_after_s, as_date, not seconds"):
        faults.build("429", {"seconds": 2})


def test_drip_and_keep_alive_end_in_a_good_answer(llm: FakeLlm) -> None:
    llm.script(faults.drip(every_s=0.0005), faults.keep_alive(times=2, every_s=0.01), Answer())
    answers = [ask(llm.url, {**flashcard_request(), "stream": stream}) for stream in (False, False, False)]
    contents = {read_completion(seen, stream=False).content for seen in answers}
    assert len(contents) == 1
    assert cards_of(contents.pop())
