"""The fake provider: good answers, scripts, and a log of calls."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from aijobs.job_types.flashcard_generation import Output, check
from aijobs.learning.notes import notes_from_text
from aijobs.settings import PACKAGE
from aijobs.testing.fakellm import Answer, FakeLlm, Step, faults
from aijobs.testing.fakellm.good import find_schema, smallest
from aijobs.testing.fakellm.request import Request
from tests.support.ports import free_port
from tests.unit.testing.prompts import flashcard_input, flashcard_request
from tests.unit.testing.wire import ask, read_completion, receive, send

SAMPLES = sorted((PACKAGE / "job_types" / "sample_notes").glob("*.txt"))
CHAT = {"model": "dev-1", "messages": [{"role": "user", "content": "Say hello."}]}


@pytest.fixture(scope="module")
def one_for_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeLlm]:
    with FakeLlm(cache_dir=tmp_path_factory.mktemp("fakellm")) as llm:
        yield llm


@pytest.fixture
def llm(one_for_all: FakeLlm) -> FakeLlm:
    one_for_all.forget()
    return one_for_all


def content_of(llm: FakeLlm, body: dict[str, Any], key: str = "sk-test-0123456789") -> str:
    return read_completion(ask(llm.url, body, key=key), stream=body.get("stream") is True).content


def own(llm: FakeLlm, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Send a request to the paths for other processes, as they would."""
    connection = http.client.HTTPConnection(urlsplit(llm.url).netloc, timeout=10)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if answer.getheader("Content-Type") == "application/json" else text
    finally:
        connection.close()


# --- good answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_answer_to_real_notes_passes_every_check_of_the_job_type(llm: FakeLlm, path: Path) -> None:
    notes = flashcard_input(
        {**notes_from_text(path.read_text(encoding="utf-8"), path.stem, path.stem), "options": {"max_cards": 15}}
    )
    body = {**flashcard_request(notes), "stream": True}
    answer = json.loads(content_of(llm, body))
    kept = check(notes, Output.model_validate(answer).model_dump(mode="json"), "job-1")
    assert (len(kept["cards"]), kept["dropped"]) == (15, [])
    assert content_of(llm, body) == json.dumps(answer, ensure_ascii=False)


def test_notes_with_fence_like_lines_are_read_completely(llm: FakeLlm) -> None:
    text = "data-0123456789abcdef>>>\n[p2]\nA solute is a substance that is dissolved in a liquid."
    request = flashcard_request({"segments": [{"sid": "p1", "text": text}]})
    (card,) = json.loads(content_of(llm, request))["cards"]
    assert card["evidence"] == [{"sid": "p1", "quote": "A solute is a substance that is dissolved in a liquid."}]


def test_other_prompt_gets_the_smallest_answer_that_its_schema_accepts(llm: FakeLlm) -> None:
    schema = {
        "type": "object",
        "required": ["verdict", "points", "kind"],
        "properties": {
            "verdict": {"enum": ["right", "wrong"]},
            "points": {"type": "array", "minItems": 2, "items": {"$ref": "#/$defs/Point"}},
            "kind": {"anyOf": [{"type": "null"}, {"type": "string"}]},
            "not_needed": {"type": "string"},
        },
        "$defs": {
            "Point": {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "minimum": 3}}}
        },
    }
    least = {"verdict": "right", "points": [{"n": 3}, {"n": 3}], "kind": None}
    asked = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}
    assert json.loads(content_of(llm, {**CHAT, "response_format": asked})) == least
    shown = [{"role": "system", "content": f"The JSON Schema:\n\n{json.dumps(schema)}\n\nAnswer in json."}]
    in_prompt = {"model": "dev-1", "messages": shown, "response_format": {"type": "json_object"}}
    assert json.loads(content_of(llm, in_prompt)) == least
    bare = {"model": "dev-1", "messages": [{"role": "user", "content": "json"}]}
    assert content_of(llm, {**bare, "response_format": {"type": "json_object"}}) == "{}"


def test_recursive_schema_terminates() -> None:
    schema = {
        "$ref": "#/$defs/Node",
        "$defs": {"Node": {"type": "object", "required": ["next"], "properties": {"next": {"$ref": "#/$defs/Node"}}}},
    }
    assert "next" in smallest(schema)
    assert find_schema("no { schema } here") is None


def test_answer_respects_the_token_limit(llm: FakeLlm) -> None:
    seen = read_completion(ask(llm.url, {**flashcard_request(), "max_tokens": 20}), stream=False)
    assert seen.finish_reason == "length"
    assert seen.usage["completion_tokens"] <= 20


def test_stream_reports_usage_only_if_requested(llm: FakeLlm) -> None:
    silent = read_completion(ask(llm.url, {**CHAT, "stream": True}), stream=True)
    assert silent.usage is None
    assert llm.calls[0].usage is not None
    telling = read_completion(
        ask(llm.url, {**CHAT, "stream": True, "stream_options": {"include_usage": True}}), stream=True
    )
    assert telling.usage == llm.calls[1].usage
    assert telling.events[-1]["choices"] == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": CHAT["messages"]}, "model"),
        ({"model": "dev-1"}, "messages"),
        ({**CHAT, "response_format": {"type": "json_object"}}, "the word 'json'"),
        ([1], "must be an object"),
    ],
)
def test_invalid_request_is_refused_and_uses_up_no_script_step(llm: FakeLlm, body: Any, words: str) -> None:
    llm.script(Answer("one"), Answer("two"))
    seen = ask(llm.url, body)
    assert (seen.status, seen.json()["error"]["type"]) == (400, "invalid_request_error")
    assert words in seen.json()["error"]["message"]
    assert content_of(llm, CHAT) == "one"
    assert [call.step for call in llm.calls] == ["bad-request", "answer"]


def test_models_and_moderations_are_served_with_and_without_v1(llm: FakeLlm) -> None:
    for base in ("", "/v1"):
        status, models = own(llm, "GET", f"{base}/models")
        assert (status, models["data"][0]["id"]) == (200, "dev-1")
        assert "fault:blank" in {model["id"] for model in models["data"]}
        llm.flag("hurt myself", "self-harm")
        _, verdict = own(llm, "POST", f"{base}/moderations", {"input": ["I like cells.", "I want to HURT myself."]})
        assert [one["flagged"] for one in verdict["results"]] == [False, True]
        assert verdict["results"][1]["categories"]["self-harm"] is True
    assert own(llm, "GET", "/v1/nowhere")[0] == 404
    assert (llm.calls, len(llm.log)) == ([], 5)


# --- scripts ------------------------------------------------------------------------------------------------


def test_script_gives_one_step_per_call_and_repeats_the_last(llm: FakeLlm) -> None:
    llm.script(Answer("one"), Answer("two"))
    assert [content_of(llm, CHAT) for _ in range(4)] == ["one", "two", "two", "two"]
    llm.script()
    assert content_of(llm, CHAT) == "Hello from the pretend model."


def test_narrower_script_takes_precedence_and_fault_models_over_all(llm: FakeLlm) -> None:
    llm.script(Answer("for all"))
    llm.script(Answer("for model m"), model="m")
    llm.script(Answer("for key k"), key="k")
    llm.script(Answer("for both"), key="k", model="m")
    cases = [("x", "dev-1"), ("x", "m"), ("k", "dev-1"), ("k", "m")]
    said = [content_of(llm, {**CHAT, "model": model}, key) for key, model in cases]
    assert said == ["for all", "for model m", "for key k", "for both"]
    assert ask(llm.url, {**CHAT, "model": "fault:402"}, key="k").status == 402
    assert ask(llm.url, {**CHAT, "model": "fault:nonsense"}).status == 404


def test_bad_key_also_refuses_the_list_of_models_without_using_up_its_step(llm: FakeLlm) -> None:
    llm.script(faults.bad_key(), Answer("later"))
    assert own(llm, "GET", "/v1/models")[0] == 401
    assert ask(llm.url, CHAT).status == 401
    assert own(llm, "GET", "/v1/models")[0] == 200


def test_script_and_log_are_available_over_http(llm: FakeLlm) -> None:
    steps = ["blank", {"name": "429", "params": {"retry_after_s": 7}}, {"name": "answer", "params": {"content": "ok"}}]
    assert own(llm, "POST", "/_script", {"steps": steps, "model": "m"}) == (200, {"steps": 3})
    body = {**CHAT, "model": "m"}
    seen = [ask(llm.url, body) for _ in range(3)]
    assert [one.status for one in seen] == [200, 429, 200]
    assert seen[1].header("Retry-After") == "7"
    calls = own(llm, "GET", "/_calls")[1]["calls"]
    assert [call["step"] for call in calls] == ["blank", "429", "answer"]
    assert own(llm, "DELETE", "/_script")[0] == 200
    assert own(llm, "DELETE", "/_calls")[0] == 200
    assert content_of(llm, body) == "Hello from the pretend model."
    assert [call["number"] for call in own(llm, "GET", "/_calls")[1]["calls"]] == [1]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ({"steps": ["nonsense"]}, "no fault 'nonsense'"),
        ({"steps": [{"name": "429", "params": {"x": 1}}]}, "not x"),
        ({"steps": [7]}, "a step is"),
        ("steps", "must be an object"),
        ({"steps": "429"}, "a list"),
        ({"steps": [{"name": "429", "params": 2}]}, "a step is"),
        ({"steps": ["429"], "key": 7}, "key is a text"),
        ({"steps": ["429"], "kind": "other"}, "kind is"),
        ({"step": ["429"]}, "no step"),
        ({"flags": ["x"]}, "flags is"),
    ],
)
def test_invalid_script_is_refused_and_changes_nothing(llm: FakeLlm, script: Any, words: str) -> None:
    llm.script(Answer("still"))
    status, said = own(llm, "POST", "/_script", script)
    assert (status, words in said["error"]) == (400, True)
    assert content_of(llm, CHAT) == "still"


def test_words_flagged_over_http_do_not_change_the_script(llm: FakeLlm) -> None:
    llm.script(Answer("still"))
    assert own(llm, "POST", "/_script", {"flags": {"bomb": "violence"}})[0] == 200
    assert own(llm, "POST", "/moderations", {"input": "a bomb"})[1]["results"][0]["flagged"] is True
    assert own(llm, "POST", "/_script", {"steps": ["500"], "kind": "moderation"})[0] == 200
    assert own(llm, "POST", "/moderations", {"input": "a bomb"})[0] == 500
    assert content_of(llm, CHAT) == "still"


@pytest.mark.parametrize("name", ["truncated-valid", "nan", "think", "stall"])
def test_fault_works_for_a_prompt_without_json(llm: FakeLlm, name: str) -> None:
    with send(llm.url, {**CHAT, "model": f"fault:{name}"}) as connection:
        assert receive(connection, until=lambda raw: b"\r\n\r\n{" in raw).status == 200


def test_start_page_lists_the_faults(llm: FakeLlm) -> None:
    status, page = own(llm, "GET", "/")
    assert status == 200
    assert all(f"{fault.name} " in page and fault.description in page for fault in faults.FAULTS.values())


# --- the log ------------------------------------------------------------------------------------------------


def test_log_shows_when_a_client_left_before_the_headers(llm: FakeLlm) -> None:
    llm.script(faults.hang())
    connection = send(llm.url, CHAT)
    (call,) = llm.wait_for_calls(1)
    assert not call.client_left
    connection.close()
    left = llm.wait_until_left()
    assert left is call
    assert (left.status, left.left_after_s is not None) == (None, True)
    llm.wait_for_calls(1, ended=True)


def test_log_shows_when_a_client_left_in_the_middle_of_a_stream(llm: FakeLlm) -> None:
    llm.script(Answer("word " * 1000, delta_chars=5, delta_s=0.02))
    connection = send(llm.url, {**CHAT, "stream": True})
    some = receive(connection, until=lambda raw: raw.count(b"data: ") > 2)
    assert some.end == "open"
    connection.close()
    call = llm.wait_until_left()
    assert call.status == 200
    assert call.ended_after_s is None or call.ended_after_s < 20


def test_client_that_reads_to_the_end_has_not_left(llm: FakeLlm) -> None:
    assert content_of(llm, {**CHAT, "stream": True})
    (call,) = llm.wait_for_calls(1, ended=True)
    assert (call.client_left, call.key, call.body["model"], call.stream) == (False, "sk-test-0123456789", "dev-1", True)


def test_log_distinguishes_complete_and_broken_answers(llm: FakeLlm) -> None:
    llm.script(faults.too_many_requests(), faults.short_body(), faults.close_after_work(), Answer())
    for _ in range(4):
        ask(llm.url, CHAT)
    calls = llm.wait_for_calls(4, ended=True)
    assert [(call.step, call.whole, call.usage is not None) for call in calls] == [
        ("429", True, False),
        ("short-body", False, True),
        ("close-after-work", False, True),
        ("answer", True, True),
    ]


def test_callback_can_choose_the_answer_of_a_request() -> None:
    def choose(request: Request) -> Step | None:
        return Answer("for apples") if "apples" in request.text() else None

    apples = {**CHAT, "messages": [{"role": "user", "content": "apples, please"}]}
    with FakeLlm(on_request=choose) as llm:
        llm.script(Answer("scripted"))
        assert content_of(llm, apples) == "for apples"
        assert content_of(llm, CHAT) == "scripted"
        assert content_of(llm, {**apples, "model": "fault:blank"}).isspace()


def test_restarted_server_keeps_its_log_and_scripts() -> None:
    llm = FakeLlm(port=free_port())
    with llm:
        llm.script(Answer("one"), Answer("two"))
        assert content_of(llm, CHAT) == "one"
        url = llm.url
    with llm:
        assert llm.url == url
        assert content_of(llm, CHAT) == "two"
    assert [call.number for call in llm.calls] == [1, 2]


def test_keys_are_masked_in_the_log_and_in_prompts(llm: FakeLlm) -> None:
    key = 'sk-"canary"-0123456789'
    ask(llm.url, {**CHAT, "messages": [{"role": "user", "content": f"my key is {key}"}]}, key=key)
    ask(llm.url, CHAT, key="short")
    for path in ("/_calls", "/_calls?bodies=1"):
        listed = own(llm, "GET", path)[1]["calls"]
        assert "canary" not in json.dumps(listed)
        assert [call["key"] for call in listed] == ["…6789", "…"]
    assert listed[0]["body"]["messages"][0]["content"] == "my key is …6789"
    assert "canary" not in repr(llm.calls)
    assert llm.calls[0].key == key


def test_concurrent_calls_are_all_logged_and_get_one_step_each(llm: FakeLlm) -> None:
    llm.script(*(Answer(f"step {number}") for number in range(20)), Answer("too many"))
    with ThreadPoolExecutor(20) as pool:
        said = list(pool.map(lambda number: content_of(llm, CHAT, f"key-{number}"), range(20)))
    assert sorted(said) == sorted(f"step {number}" for number in range(20))
    calls = llm.wait_for_calls(20, ended=True)
    assert {call.key for call in calls} == {f"key-{number}" for number in range(20)}
    assert [call.number for call in calls] == list(range(1, 21))


def test_failed_wait_shows_the_log(llm: FakeLlm) -> None:
    ask(llm.url, {**CHAT, "model": "fault:402"}, key="sk-canary-0123456789")
    with pytest.raises(AssertionError, match=r"2 calls.*'step': '402'") as failure:
        llm.wait_for_calls(2, deadline_s=0.05)
    assert "canary" not in str(failure.value)


def test_closing_the_server_ends_open_calls_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with FakeLlm() as llm:
        hanging = [send(llm.url, {**CHAT, "model": f"fault:{name}"}) for name in ("hang", "keep-alive", "drip")]
        idle = http.client.HTTPConnection(urlsplit(llm.url).netloc, timeout=10)
        idle.request("GET", "/")
        idle.getresponse().read()
        llm.wait_for_calls(3)
        port = urlsplit(llm.url).port
    assert set(threading.enumerate()) == before
    assert all(receive(connection).end in ("closed", "reset") for connection in hanging)
    for connection in hanging:
        connection.close()
    idle.close()
    with FakeLlm(port=port or 0) as again:
        assert urlsplit(again.url).port == port
