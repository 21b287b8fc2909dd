"""Build the engine of a worker process, and of its child processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aijobs.ai.billing.usage import UsageLog
from aijobs.ai.calling.gateway import AiGateway
from aijobs.ai.providers.openai_compatible import OpenAiCompatibleProvider, load_client
from aijobs.definitions.definition import JobDefinition
from aijobs.engine.active_runs import ActiveRuns
from aijobs.engine.attempts import Attempts
from aijobs.engine.child import Answer
from aijobs.engine.child_attempts import ChildAttempts
from aijobs.engine.child_runner import ChildRunner
from aijobs.engine.children import Children
from aijobs.engine.end_writes import EndWrites
from aijobs.engine.ending import Ending
from aijobs.engine.engine import ExecutionEngine
from aijobs.engine.execute import Execute
from aijobs.engine.isolation import Isolation
from aijobs.engine.prepare import Prepare
from aijobs.engine.project import Project
from aijobs.engine.resolve import Resolve
from aijobs.engine.watcher import Watcher
from aijobs.ids import InstanceId
from aijobs.learning.rules import LocalProvider
from aijobs.logs import configure
from aijobs.queues.presence import Presence
from aijobs.settings import Settings
from aijobs.upkeep.dispatcher import hand_over
from aijobs.wiring.providers import build_guard, build_servers, find_moderator
from aijobs.wiring.services import Services, build_services


def build_engine(
    services: Services, presence: Presence, instance: InstanceId, abandon: Callable[[], None]
) -> ExecutionEngine:
    """Build the engine of one worker process."""
    s, settings, ending = services, services.settings, build_ending(services)
    active = ActiveRuns(ending, presence)
    watcher = Watcher(
        s.database,
        s.lifecycle,
        s.broker,
        active,
        ending,
        abandon=abandon,
        heartbeat_s=settings.heartbeat_s,
        watch_s=settings.watcher_s,
        stuck_s=settings.stuck_attempt_s,
    )
    return ExecutionEngine(
        build_prepare(services, instance),
        build_attempts(services, ending),
        active,
        watcher,
        Isolation(ChildAttempts(s.lifecycle, ending, s.bus), Children()),
    )


def build_prepare(services: Services, instance: InstanceId) -> Prepare:
    """Build what locks jobs for one process."""
    s = services
    return Prepare(
        s.database,
        s.clock,
        s.registry,
        s.lifecycle,
        s.outbox_events,
        str(instance),
        put_back=hand_over(s.broker),
        make_ready=_client_loader(s),
    )


def build_ending(services: Services) -> Ending:
    """Build the only door through which attempts end."""
    s = services
    patience = s.settings.seconds("provider_patience")
    return Ending(s.lifecycle, EndWrites(s.database, s.clock, s.lifecycle, UsageLog(s.clock), patience=patience))


def build_attempts(services: Services, ending: Ending) -> Attempts:
    """Build the road of attempts, for worker processes and for their children."""
    s, settings = services, services.settings
    usage, servers = UsageLog(s.clock), build_servers(s.catalogue)
    gateway, moderator = build_gateway(services, servers), find_moderator(s.catalogue, servers)
    return Attempts(
        resolve=Resolve(s.database, s.prompts, s.router, s.credentials),
        execute=Execute(s.database, s.lifecycle, gateway, usage, s.costs, build_guard(settings), moderator),
        project=Project(s.database, s.lifecycle, s.registry),
        ending=ending,
    )


def build_child_runner() -> Callable[[Mapping[str, Any]], Answer]:
    """Return what runs attempts that a parent process has locked, with connections of this process's own."""
    settings = Settings.load()
    configure(settings.log_level)
    services = build_services(settings)
    if any(config.ready for config in services.catalogue.providers.values()):
        load_client()  # Before the first attempt, whose time begins in the parent.
    return ChildRunner(
        services.lifecycle,
        build_prepare(services, InstanceId.current()),
        build_attempts(services, build_ending(services)),
        services.bus,
    ).run


def _client_loader(services: Services) -> Callable[[JobDefinition, str], None]:
    """Return what loads the client for jobs that may call a server. The built-in provider needs none."""
    providers = services.catalogue.providers
    has_moderator = any(config.moderation_model and config.ready for config in providers.values())

    def make_ready(definition: JobDefinition, credential_mode: str) -> None:
        judged = has_moderator and definition.security.content_safety_check
        if judged or services.router.may_ask(definition, credential_mode, providers):
            load_client()

    return make_ready


def build_gateway(services: Services, servers: Sequence[OpenAiCompatibleProvider]) -> AiGateway:
    """Build the gateway to all providers. It connects to none yet."""
    s = services
    limits = {name: config.max_concurrent_calls for name, config in s.catalogue.providers.items()}
    local = LocalProvider(s.settings.instance_path / "jieba")
    return AiGateway([local, *servers], limits, s.breaker, s.call_slots)
