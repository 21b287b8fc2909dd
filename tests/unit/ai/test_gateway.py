"""Router and gateway: one way to a provider, and a call announced before it leaves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from aijobs.ai.gateway import AiGateway
from aijobs.ai.prompts import Prompt
from aijobs.ai.provider import CancellationToken, GenerateAnswer, GenerateRequest, Route
from aijobs.ai.router import ModelRouter
from aijobs.errors import JobError
from tests.support.tokens import HandToken

LOCAL, LARGE, OWN = Route("local", "m"), Route("deepseek", "large"), Route("deepseek", "own")
ROUTER = ModelRouter({"default": LOCAL, "large": LARGE}, "default", {"user_deepseek_key": OWN})


@dataclass(frozen=True)
class Type:
    job_type: str = "poem"
    route: str | None = None


class Recorder:
    name = "local"

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def generate(self, request: GenerateRequest, token: CancellationToken) -> GenerateAnswer:
        self._log.append("asked")
        return GenerateAnswer("{}", "local", request.route.model, 1, 1, 0, True, "length")


def request(route: Route = LOCAL) -> GenerateRequest:
    return GenerateRequest("poem", route, Prompt("s", "u", "v1"), {}, {})


@pytest.mark.parametrize(
    ("route", "mode", "expected"),
    [
        (None, "platform_key", LOCAL),
        ("large", "platform_key", LARGE),
        (None, "user_deepseek_key", OWN),
        ("large", "user_deepseek_key", OWN),
    ],
)
def test_a_users_key_never_pays_a_route_of_the_platform(route: str | None, mode: str, expected: Route) -> None:
    assert ROUTER.route(Type(route=route), mode) == expected


@pytest.mark.parametrize(("route", "mode"), [("gone", "platform_key"), (None, "user_deepseek_key")])
def test_a_route_that_is_not_configured_is_a_fault_of_ours(route: str | None, mode: str) -> None:
    with pytest.raises(JobError, match="INTERNAL_CONFIG"):
        ModelRouter({"default": LOCAL}, "default").route(Type(route=route), mode)


def test_a_call_is_announced_before_it_leaves() -> None:
    log: list[str] = []

    answer = AiGateway([Recorder(log)]).generate(request(), HandToken(), lambda route: log.append(route.model))

    assert log == ["m", "asked"]
    assert answer.finish_reason == "length"


def test_a_cancelled_attempt_makes_no_call_and_announces_none() -> None:
    log: list[str] = []

    with pytest.raises(JobError, match="CANCELLED"):
        AiGateway([Recorder(log)]).generate(request(), HandToken(0), lambda route: log.append(route.model))

    assert log == []


def test_a_route_to_no_provider_is_a_fault_of_ours() -> None:
    with pytest.raises(JobError, match="INTERNAL_CONFIG"):
        AiGateway([]).generate(request(), HandToken())
