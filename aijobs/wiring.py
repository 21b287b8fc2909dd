"""The only place that chooses real collaborators: settings in, services, workers and passes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from functools import cache, cached_property, partial
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import TYPE_CHECKING, Any

from aijobs import job_types
from aijobs.ai.billing.cost import BUILT_IN, CostCalculator
from aijobs.ai.billing.forecast import Forecaster
from aijobs.ai.billing.usage import UsageLog
from aijobs.ai.calling.availability import Availability
from aijobs.ai.calling.breaker import BreakerStore, CircuitBreaker
from aijobs.ai.calling.gateway import AiGateway
from aijobs.ai.calling.router import ModelRouter
from aijobs.ai.calling.slots import CallSlots
from aijobs.ai.catalogue import DEFAULT, Catalogue
from aijobs.ai.prompts import PromptTemplates
from aijobs.ai.provider import Moderator
from aijobs.ai.providers.openai_compatible import LoopThread, OpenAiCompatibleProvider, load_client
from aijobs.credentials.rotation import CredentialRotation
from aijobs.credentials.service import CredentialService
from aijobs.credentials.store import CredentialStore
from aijobs.credentials.vault import CredentialVault
from aijobs.db.clock import Clock, DatabaseClock
from aijobs.db.database import Database
from aijobs.db.engines import check_packet
from aijobs.db.schema import check_schema
from aijobs.definitions.definition import MAINTENANCE_QUEUE, JobDefinition
from aijobs.definitions.discovery import find_job_types, prompt_folders
from aijobs.definitions.registry import JobDefinitionRegistry
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
from aijobs.engine.guard import Guard
from aijobs.engine.isolation import Isolation
from aijobs.engine.prepare import Prepare
from aijobs.engine.project import Project
from aijobs.engine.resolve import Resolve
from aijobs.engine.watcher import Watcher
from aijobs.errors import SettingsError, UnknownJobType
from aijobs.events import EventBus
from aijobs.forks import new_lock
from aijobs.ids import InstanceId
from aijobs.jobs.creation import JobCreation
from aijobs.jobs.lease import LeasePolicy
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.jobs.limits import Limits, Quota, UserLimits
from aijobs.jobs.models import AiJob
from aijobs.jobs.service import AiJobService
from aijobs.jobs.snapshots import SnapshotBuilder
from aijobs.learning.flashcards import FlashcardService
from aijobs.learning.rules import LocalProvider
from aijobs.logs import configure
from aijobs.outbox.repository import OutboxRepository
from aijobs.outbox.service import OutboxService
from aijobs.queues.breaker_store import RedisBreakerStore
from aijobs.queues.broker import RedisBroker
from aijobs.queues.call_slots import RedisCallSlots
from aijobs.queues.crew import Crew, Pass
from aijobs.queues.message import OutgoingMessage
from aijobs.queues.presence import BEAT_S, Presence, PresenceReader
from aijobs.queues.shared_texts import SharedTexts
from aijobs.screening.safety import ContentSafety
from aijobs.settings import Settings
from aijobs.upkeep.cleanup import SnapshotCleanup
from aijobs.upkeep.dispatcher import OutboxDispatcher, hand_over
from aijobs.upkeep.pass_log import PassLog
from aijobs.upkeep.reaper import LockReaper
from aijobs.upkeep.redrive import Redrive
from aijobs.upkeep.retention import Retention

if TYPE_CHECKING:
    from aijobs.monitor.monitor import Monitor

POOL_SIZE = 10
"""Connections that a process keeps; it may open ten more for a while."""
HOUSEKEEPING = 5
"""Of them, those for what isn't an attempt: watcher, catch-up, a lost COMMIT that is looked for."""


@dataclass(frozen=True)
class Services:
    """What web, workers and commands work with. One a process."""

    settings: Settings
    database: Database
    clock: Clock
    registry: JobDefinitionRegistry
    prompts: PromptTemplates
    catalogue: Catalogue
    router: ModelRouter
    breaker: CircuitBreaker
    call_slots: CallSlots
    costs: CostCalculator
    bus: EventBus
    broker: RedisBroker
    presence: PresenceReader
    outbox_events: OutboxRepository
    outbox: OutboxService
    lifecycle: LifecycleRepository
    jobs: AiJobService
    flashcards: FlashcardService
    credential_store: CredentialStore
    credentials: CredentialService

    @cached_property
    def monitor(self) -> Monitor:
        """What people see. Loaded where somebody looks: a worker that was killed is back sooner without it."""
        from aijobs.monitor.monitor import Monitor
        from aijobs.monitor.providers import ProviderReads

        providers = ProviderReads(self.clock, self.catalogue, self.breaker, self.call_slots, self.router)
        return Monitor(self.settings, self.database, self.clock, self.registry, self.broker, self.presence, providers)

    def check_start(self) -> None:
        """`SettingsError` where the database's schema is not the one that this code knows, its server takes too little
        in one statement, or users' stored keys need a key that the ring doesn't hold.

        Leaves no connection open: servers fork after they imported the application.
        """
        try:
            check_schema(self.database.engine)
            check_packet(self.database.engine)
            self.credentials.check_ring()
        finally:
            self.database.dispose()


def build_services(
    settings: Settings,
    *,
    workers: int = 1,
    database: Database | None = None,
    clock: Clock | None = None,
    broker: RedisBroker | None = None,
    breaker_store: BreakerStore | None = None,
    call_slots: CallSlots | None = None,
) -> Services:
    """Everything but workers. Nothing is connected yet; a definition or a providers file that is wrong stops the start
    with what is wrong in it. `workers` is how many jobs the process runs at once, which its connections are to suffice
    for: beats mustn't wait behind them.
    """
    database = database or Database(settings.database_url, pool_size=max(POOL_SIZE, workers + HOUSEKEEPING))
    clock = clock or DatabaseClock()
    broker = broker or RedisBroker.from_settings(settings)
    presence = PresenceReader(broker.window)
    if breaker_store is None or call_slots is None:
        texts = SharedTexts(broker.window)
        breaker_store = breaker_store or RedisBreakerStore(texts)
        call_slots = call_slots or RedisCallSlots(texts, InstanceId.current())
    catalogue = Catalogue.load(settings.providers, settings.provider_keys)
    router = ModelRouter(catalogue.routes, DEFAULT, catalogue.user_routes)
    breaker = CircuitBreaker(breaker_store, settings.breaker_failures, settings.breaker_open_s)
    costs = build_costs(settings, catalogue)
    _check_cost_quotas(settings, catalogue, costs)
    modules = find_job_types(job_types)
    prompts = PromptTemplates(prompt_folders(modules))
    registry = build_registry(prompts, modules, router, production=settings.production, timeouts=settings.job_timeouts)
    check_limits(catalogue, router, registry)
    outbox = OutboxRepository(clock, settings.message_keys)
    policy = LeasePolicy(settings.seconds("lease"), settings.seconds("lease_grace"))
    bus = EventBus()
    lifecycle = LifecycleRepository(database, clock, outbox, policy, bus)
    credential_store = build_credential_store(settings, clock)
    jobs = AiJobService(
        database,
        clock,
        registry,
        lifecycle,
        outbox,
        JobCreation(
            clock,
            lifecycle,
            outbox,
            SnapshotBuilder(clock, timedelta(days=settings.snapshot_days)),
            UserLimits(_limits(settings), Forecaster(router.routes, costs)),
            hand_over(broker),
            settings.seconds("handover_delay"),
        ),
        settings.message_keys,
        withdraw=_withdraw(broker),
        known_prompt=prompts.exists,
        unavailable_for=Availability(router, breaker).unavailable_for,
        owns_credential=credential_store.owns,
    )
    return Services(
        settings=settings,
        database=database,
        clock=clock,
        registry=registry,
        prompts=prompts,
        catalogue=catalogue,
        router=router,
        breaker=breaker,
        call_slots=call_slots,
        costs=costs,
        bus=bus,
        broker=broker,
        presence=presence,
        outbox_events=outbox,
        outbox=OutboxService(database, outbox),
        lifecycle=lifecycle,
        jobs=jobs,
        flashcards=FlashcardService(database, jobs),
        credential_store=credential_store,
        credentials=CredentialService(database, clock, credential_store),
    )


def _check_cost_quotas(settings: Settings, catalogue: Catalogue, costs: CostCalculator) -> None:
    """Refuse a quota of cost that would never be reached, as a model that calls may go to has no price."""
    if not settings.quota_day_cost_micros and not settings.quota_month_cost_micros:
        return
    routed = {route for routes in catalogue.routes.values() for route in routes}
    unpriced = sorted(f"{route.provider}/{route.model}" for route in routed if not costs.knows(*astuple(route)))
    if unpriced:
        raise SettingsError(f"a quota of cost can't hold: no price is known for {', '.join(unpriced)} (AIJOBS_PRICES)")


def build_credential_store(settings: Settings, clock: Clock) -> CredentialStore:
    """Users' own keys under the ring of the settings."""
    return CredentialStore(clock, CredentialVault(settings.credential_keys, settings.secret_key))


def build_registry(
    prompts: PromptTemplates,
    modules: Iterable[ModuleType],
    router: ModelRouter,
    *,
    production: bool,
    timeouts: Mapping[str, float] | None = None,
) -> JobDefinitionRegistry:
    """All job types and projectors there are, checked. `timeouts`: seconds of an attempt that an operator set."""
    registry = JobDefinitionRegistry(prompts.exists, router.knows)
    try:
        registry.load(modules, production=production, timeouts=timeouts)
    except UnknownJobType as unknown:
        known = ", ".join(definition.job_type for definition in registry.get_all())
        raise SettingsError(f"AIJOBS_JOB_TIMEOUTS: {unknown}; there are {known}") from None
    return registry


def check_limits(catalogue: Catalogue, router: ModelRouter, registry: JobDefinitionRegistry) -> None:
    """Refuse a limit of the providers file that is longer than the time of a job that may be sent to its provider.

    Limits that aren't written there bend to the job's time.
    """
    for definition in registry.get_all():
        if definition.prompt is None:
            continue
        name, has_s = definition.job_type, definition.execution.timeout_ms / 1000
        modes = definition.credential.allowed_modes
        asked = {route.provider for mode in modes for route in router.routes(definition, mode)}
        for provider in sorted(asked & set(catalogue.providers)):
            for entry, seconds in catalogue.providers[provider].written_limits():
                if seconds > has_s:
                    raise SettingsError(
                        f"the providers file: {provider}: {entry} is {seconds:g}, but an attempt of {name} has "
                        f"{has_s:g} s: lower it, or set AIJOBS_JOB_TIMEOUTS={name}={seconds:g}"
                    )


def _limits(settings: Settings) -> Limits:
    """What one user may ask for."""
    s = settings
    return Limits(
        s.user_active_jobs,
        day=Quota(s.quota_day_jobs, s.quota_day_tokens, s.quota_day_cost_micros),
        month=Quota(s.quota_month_jobs, s.quota_month_tokens, s.quota_month_cost_micros),
    )


def _withdraw(broker: RedisBroker) -> Callable[[AiJob, OutgoingMessage | None], None]:
    """What follows a cancel that was requested: a hint for the worker, or the waiting message taken back."""

    def withdraw(job: AiJob, waiting: OutgoingMessage | None) -> None:
        if job.locked_by is not None:
            broker.hint_cancel(job.id)
        elif waiting is not None:
            broker.remove(waiting)

    return withdraw


def build_engine(
    services: Services, presence: Presence, instance: InstanceId, abandon: Callable[[], None]
) -> ExecutionEngine:
    """The engine of one worker process."""
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
    """What locks jobs for one process."""
    s = services
    return Prepare(
        s.database,
        s.clock,
        s.registry,
        s.lifecycle,
        s.outbox_events,
        str(instance),
        send_back=hand_over(s.broker),
        make_ready=_client_loader(s),
    )


def build_ending(services: Services) -> Ending:
    """The only door through which attempts end."""
    s = services
    patience = s.settings.seconds("provider_patience")
    return Ending(s.lifecycle, EndWrites(s.database, s.clock, s.lifecycle, UsageLog(s.clock), patience=patience))


def build_attempts(services: Services, ending: Ending) -> Attempts:
    """The road of attempts: the same in a worker process and in its child processes."""
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
    """What runs attempts that a parent process has locked, with connections of this process's own."""
    settings = Settings.load()
    configure(settings.log_level)
    services = build_services(settings)
    return ChildRunner(
        services.lifecycle,
        build_prepare(services, InstanceId.current()),
        build_attempts(services, build_ending(services)),
        services.bus,
    ).run


def _client_loader(services: Services) -> Callable[[JobDefinition, str], None]:
    """Return what loads the client for jobs that may ask a server. The built-in provider does without it."""
    providers = services.catalogue.providers
    has_moderator = any(config.moderation_model and config.ready for config in providers.values())

    def make_ready(definition: JobDefinition, credential_mode: str) -> None:
        judged = has_moderator and definition.security.content_safety_check
        if judged or services.router.may_ask(definition, credential_mode, providers):
            load_client()

    return make_ready


_load_safety = cache(ContentSafety.load)
_SAFETY_LOCK = new_lock()


def build_guard(settings: Settings) -> Guard:
    """What stands before and behind the work of attempts. `SettingsError` for safety rules that can't be used."""
    safety = partial(_safety, Path(settings.safety_rules) if settings.safety_rules else None)
    if settings.safety_rules:
        safety()  # An operator's rules may be wrong, which a start is to say. Ours are right, and can wait.
    return Guard(safety)


def _safety(rules: Path | None) -> ContentSafety:
    """Read once a process: `cache` alone would have each of several that are the first at once read them."""
    with _SAFETY_LOCK:
        return _load_safety(rules)


def build_gateway(services: Services, servers: Sequence[OpenAiCompatibleProvider]) -> AiGateway:
    """The way to all providers there are. No connection is opened yet."""
    s = services
    limits = {name: config.max_concurrent_calls for name, config in s.catalogue.providers.items()}
    local = LocalProvider(s.settings.instance_path / "jieba")
    return AiGateway([local, *servers], limits, s.breaker, s.call_slots)


def find_moderator(catalogue: Catalogue, servers: Iterable[OpenAiCompatibleProvider]) -> Moderator | None:
    """The first server of the catalogue that judges content and can be called; None where there is none."""
    names = [name for name, config in catalogue.providers.items() if config.moderation_model and config.ready]
    return next((server for server in servers if server.name in names[:1]), None)


def build_servers(catalogue: Catalogue) -> list[OpenAiCompatibleProvider]:
    """A provider for each server of the catalogue, all on one loop."""
    loop = LoopThread()
    return [OpenAiCompatibleProvider(config, loop) for config in catalogue.providers.values()]


def build_costs(settings: Settings, catalogue: Catalogue) -> CostCalculator:
    """What calls cost, by the operator's price list or the built-in one."""
    path = Path(settings.prices) if settings.prices else BUILT_IN
    return CostCalculator.load(path, catalogue.price_names())


def build_job_crew(
    services: Services, queue_name: str, abandon: Callable[[], None], *, workers: int | None = None
) -> Crew:
    """What a consumer of a queue of jobs works with; `workers` is how many jobs it runs at once, for its heartbeat."""
    services.check_start()
    instance = InstanceId.current()
    presence = build_presence(services, instance, queue_name, workers)
    engine = build_engine(services, presence, instance, abandon)
    reaper = LockReaper(services.database, services.lifecycle)
    redrive = build_redrive(services)

    def start() -> None:
        engine.start()
        presence.start()
        if any(config.ready for config in services.catalogue.providers.values()):
            # In the background, so that the worker takes jobs at once; the first that asks a server waits for it.
            Thread(target=load_client, name="load-client", daemon=True).start()

    def take_over() -> None:
        if reaper.give_back_dead(instance):
            engine.alarm()

    def drain(grace_s: float) -> None:
        engine.drain(grace_s)
        engine.close()
        presence.leave()

    return Crew(
        run_job=engine.execute,
        asked=presence.asked,
        run_suspect=engine.run_suspect,
        start=start,
        before_first=(take_over,),
        catch_up=(lambda: redrive.run(queue_name, due_for=timedelta()),),
        drain=drain,
    )


def build_maintenance_crew(services: Services) -> Crew:
    """What a consumer of the maintenance queue works with: the passes."""
    services.check_start()
    s, settings = services, services.settings
    instance = InstanceId.current()
    presence = build_presence(s, instance, MAINTENANCE_QUEUE)
    dispatcher = OutboxDispatcher(
        s.database,
        s.outbox_events,
        s.lifecycle,
        s.broker,
        str(instance),
        batch=settings.dispatch_batch,
        claim_ttl=settings.seconds("claim_ttl"),
    )
    log = PassLog(s.database, s.clock)

    def noted(name: str, every_s: float, run: Callable[[], object]) -> Pass:
        return Pass(name, every_s, partial(log.run, name, every_s, run))

    reaper = LockReaper(s.database, s.lifecycle, progress=log.progress("reaper", settings.reaper_s))
    redrive = build_redrive(s, log.progress("redrive", settings.redrive_s))
    cleanup = SnapshotCleanup(s.database, s.clock, progress=log.progress("snapshot_cleanup", settings.cleanup_s))
    retention = build_retention(s, log.progress("retention", settings.cleanup_s))
    return Crew(
        passes=(
            noted("dispatcher", settings.dispatcher_s, dispatcher.cycle),
            noted("claim_release", settings.claim_release_s, dispatcher.release_expired_claims),
            noted("reaper", settings.reaper_s, reaper.reap),
            noted("redrive", settings.redrive_s, redrive.run),
            noted("snapshot_cleanup", settings.cleanup_s, cleanup.run),
            noted("retention", settings.cleanup_s, retention.run),
        ),
        asked=presence.asked,
        start=presence.start,
        catch_up=(lambda: reaper.give_back_dead(instance),),
        drain=lambda grace_s: presence.leave(),
    )


def build_presence(services: Services, instance: InstanceId, queue_name: str, workers: int | None = None) -> Presence:
    """The heartbeat of one consumer process; a long lease makes it no slower than its key lives."""
    beat_s = min(services.settings.heartbeat_s, BEAT_S)
    return Presence(services.broker.client, instance, queue_name, slots=workers, beat_s=beat_s)


def build_retention(services: Services, progress: Callable[[], None] = lambda: None) -> Retention:
    """What deletes old jobs and sessions of operators."""
    settings = services.settings
    return Retention(
        services.database,
        services.clock,
        keep_jobs=timedelta(days=settings.job_days),
        keep_tombstones=timedelta(days=settings.tombstone_days),
        keep_sessions=timedelta(days=settings.session_max_days + 1),  # Until then the sign-in page can say why.
        progress=progress,
    )


def build_rotation(services: Services) -> CredentialRotation:
    """What moves users' stored keys under the ring's newest key."""
    return CredentialRotation(services.database, services.credential_store)


def build_redrive(services: Services, progress: Callable[[], None] = lambda: None) -> Redrive:
    """The pass that looks for lost messages."""
    s, due_for = services, services.settings.seconds("redrive_due")
    return Redrive(s.database, s.clock, s.outbox_events, s.broker, due_for=due_for, progress=progress)
