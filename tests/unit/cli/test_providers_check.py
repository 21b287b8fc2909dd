"""`aijobs providers check`: working providers, and messages for the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aijobs.testing.fakellm import Answer, FakeLlm, faults

Aijobs = Callable[..., tuple[int, str, str]]
KEY = "sk-canary-0123456789abcdef"


@pytest.fixture(scope="module")
def server() -> Iterator[FakeLlm]:
    with FakeLlm() as llm:
        yield llm


@pytest.fixture
def llm(server: FakeLlm, instance: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLlm:
    """A server in the providers file: `m1` is on a route, `m2` is not."""
    server.forget()
    monkeypatch.setenv("AIJOBS_PROVIDERS", str(write_providers(instance, server)))
    monkeypatch.setenv("AIJOBS_ACME_API_KEY", KEY)
    return server


def write_providers(instance: Path, server: FakeLlm, limits: str = "") -> Path:
    path = instance.parent / "providers.toml"
    path.write_text(
        f'[provider.acme]\nbase_url = "{server.url}/v1"\nmodels = ["m1", "m2"]\n'
        f'{limits}\n[routes]\ndefault = ["acme/m1"]\n'
    )
    return path


def test_providers_check_without_setup_names_the_missing_key(aijobs: Aijobs) -> None:
    assert aijobs("providers", "check") == (
        0,
        "no key deepseek: AIJOBS_DEEPSEEK_API_KEY is not set\n"
        "route  default: local/local-extractive-v1\n"
        "route  user_deepseek_key: deepseek/deepseek-flash\n",
        "",
    )


def test_each_model_in_use_is_called_once(aijobs: Aijobs, llm: FakeLlm) -> None:
    llm.script(Answer('{"word": "pong"}'))
    code, out, err = aijobs("providers", "check")
    assert (code, err, [call.model for call in llm.calls]) == (0, "", ["m1"])
    assert out.startswith("works  acme/m1: ")
    assert "no price known" in out
    aijobs("providers", "check", "--all-models")
    assert [call.model for call in llm.calls] == ["m1", "m1", "m2"]


def test_invalid_token_count_is_not_shown(aijobs: Aijobs, llm: FakeLlm) -> None:
    llm.script(Answer('{"word": "pong"}', usage={"prompt_tokens": True, "completion_tokens": 5, "total_tokens": 6}))
    code, out, _ = aijobs("providers", "check")
    assert code == 0
    assert "tokens not counted" in out


def test_server_without_schema_support_works_and_is_reported(aijobs: Aijobs, llm: FakeLlm) -> None:
    llm.script(faults.no_json_schema())
    code, out, _ = aijobs("providers", "check")
    assert (code, len(llm.calls)) == (0, 2)
    assert "takes no schema" in out


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("401", "CREDENTIAL_PLATFORM_INVALID: the server answered 401"),
        ("402", "PROVIDER_ACCOUNT_EXHAUSTED: the server answered 402"),
        ("404", "INTERNAL_CONFIG: the server answered 404"),
        ("key-echo", "INTERNAL_CONFIG: the server answered 400"),
        ("blank", "PROVIDER_EMPTY_OUTPUT: the answer was empty"),
        ("html", "PROVIDER_UNAVAILABLE: the server answered 200 with no answer of a model"),
    ],
)
def test_failed_provider_is_reported_without_its_key(aijobs: Aijobs, llm: FakeLlm, fault: str, said: str) -> None:
    llm.script(faults.build(fault))
    code, out, err = aijobs("providers", "check")
    assert (code, err) == (1, "")
    assert said in out
    assert KEY not in out


def test_silent_provider_times_out_at_its_own_limit(aijobs: Aijobs, llm: FakeLlm, instance: Path) -> None:
    write_providers(instance, llm, "first_data_s = 0.5")
    llm.script(faults.hang())
    code, out, err = aijobs("providers", "check")
    assert (code, err) == (1, "")
    assert "PROVIDER_TIMEOUT: no data within 0.5 s" in out


def test_providers_check_can_print_json(aijobs: Aijobs, llm: FakeLlm) -> None:
    llm.script(faults.bad_key())
    code, out, _ = aijobs("providers", "check", "--json")
    report = json.loads(out)
    assert code == 1
    assert [(trial["provider"], trial["model"], trial["works"]) for trial in report["trials"]] == [
        ("acme", "m1", False)
    ]
    assert report["routes"]["default"] == ["acme/m1"]


def test_key_of_an_unknown_provider_is_reported_in_one_line(
    aijobs: Aijobs, llm: FakeLlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIJOBS_ACMEE_API_KEY", KEY)
    code, out, err = aijobs("providers", "check")
    assert (code, out) == (1, "")
    assert "AIJOBS_ACMEE_API_KEY: there is no provider acmee" in err
    assert err.count("\n") == 1
