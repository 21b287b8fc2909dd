"""Fixtures: engines whose provider is a scripted server over a real socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest

from aijobs.ai.calling.breaker import CircuitBreaker
from aijobs.ai.calling.gateway import AiGateway
from aijobs.ai.calling.router import ModelRouter
from aijobs.ai.catalogue import ProviderConfig
from aijobs.ai.provider import Route
from aijobs.ai.providers.openai_compatible import LoopThread, OpenAiCompatibleProvider, load_client
from aijobs.definitions.definition import PLATFORM_KEY, USER_DEEPSEEK_KEY
from aijobs.job_types import flashcard_generation
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreateJobInput, Overrides
from aijobs.testing.fakellm import FakeLlm, Step
from aijobs.testing.memory_breaker_store import MemoryBreakerStore
from aijobs.testing.memory_call_slots import MemoryCallSlots
from tests.integration.engine.stage import NOTES, Stage, open_stage
from tests.support.jobs import Kit

KEY = "sk-platform-0123456789abcdef"
LOOP = LoopThread()


@pytest.fixture(scope="session", autouse=True)
def _loaded_client() -> None:
    """Load the client before any test, as a worker with remote providers does before it takes jobs."""
    load_client()


def server_config(url: str, name: str = "acme", **changes: Any) -> ProviderConfig:
    """Return a provider at `url`. A test of a limit sets that limit short enough to wait for."""
    config = ProviderConfig(
        name=name,
        base_url=url + "/v1",
        models=("m1", "m2"),
        json_mode="json_schema",
        key=KEY,
        needs_key=True,
        prices_as="deepseek",
        tokens_name="max_tokens",
        max_output_tokens=None,
        context_tokens=None,
        max_concurrent_calls=0,
        moderation_model=None,
        connect_s=10,
        first_data_s=30,
        idle_s=30,
    )
    return replace(config, **changes)


@dataclass
class Live:
    """A stage whose provider is a server over a socket."""

    stage: Stage
    llm: FakeLlm
    breaker: CircuitBreaker
    job_type: str

    def run(self, *steps: Step, job_type: str | None = None) -> AiJob:
        """Run a job to its end; `steps` are the server's answers to its calls, in order."""
        self.llm.script(*steps)
        return self.stage.run_to_end(self.new(job_type))

    def new(self, job_type: str | None = None) -> str:
        """Create a queued job and return its id."""
        return self.stage.new_cards(job_type or self.job_type)

    def new_on(self, api_key: str) -> tuple[str, str]:
        """Create a queued job of a user who pays with this key; return its id and the credential's."""
        kit, definition = self.stage.kit, flashcard_generation.DEFINITION
        credential = kit.services.credentials.create("u1", mode=USER_DEEPSEEK_KEY, label="mine", key=api_key)
        modes = replace(definition.credential, allowed_modes=(PLATFORM_KEY, USER_DEEPSEEK_KEY))
        job_type = self.stage.define(replace(definition, credential=modes), delay=10)
        overrides = Overrides(credential_mode=USER_DEEPSEEK_KEY, credential_id=credential.id)
        request = CreateJobInput("u1", job_type, "note", "note-1", NOTES, overrides=overrides)
        return kit.jobs.create_job(request).job.id, credential.id


LiveOpener = Callable[..., Live]


@pytest.fixture
def open_live(sqlite_kit: Kit) -> Iterator[LiveOpener]:
    """`open_live(**config)` opens a live stage; `second` is the URL of a second provider on its route."""
    with ExitStack() as stack:

        def opened(kit: Kit = sqlite_kit, *, second: str | None = None, failures: int = 50, **config: Any) -> Live:
            llm = stack.enter_context(FakeLlm())
            configs = [server_config(llm.url, **config)]
            if second is not None:
                configs.append(server_config(second, "backup"))
            breaker = CircuitBreaker(MemoryBreakerStore(), failures, 30.0, chance=lambda: 0.0)
            providers = [OpenAiCompatibleProvider(each, LOOP) for each in configs]
            for provider in providers:
                stack.callback(provider.close)
            gateway = AiGateway(
                providers,
                {each.name: each.max_concurrent_calls for each in configs},
                breaker,
                MemoryCallSlots(),
            )
            routes = tuple(Route(each.name, "m1") for each in configs)
            router = ModelRouter({"d": routes}, "d", {"user_deepseek_key": routes[:1]})
            moderator = providers[0] if configs[0].moderation_model else None
            stage = stack.enter_context(open_stage(kit, gateway=gateway, router=router, moderator=moderator))
            job_type = stage.define(flashcard_generation.DEFINITION, delay=10)
            return Live(stage, llm, breaker, job_type)

        yield opened


@pytest.fixture
def live(open_live: LiveOpener) -> Live:
    """A live stage with one provider."""
    return open_live()
