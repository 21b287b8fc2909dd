"""What web, workers and commands work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING

from aijobs import job_types
from aijobs.ai.billing.cost import CostCalculator
from aijobs.ai.billing.forecast import Forecaster
from aijobs.ai.calling.availability import Availability
from aijobs.ai.calling.breaker import BreakerStore, CircuitBreaker
from aijobs.ai.calling.router import ModelRouter
from aijobs.ai.calling.slots import CallSlots
from aijobs.ai.catalogue import DEFAULT, Catalogue
from aijobs.ai.prompts import PromptTemplates
from aijobs.credentials.service import CredentialService
from aijobs.credentials.store import CredentialStore
from aijobs.db.clock import Clock, DatabaseClock
from aijobs.db.database import Database
from aijobs.db.engines import check_packet
from aijobs.db.schema import check_schema
from aijobs.definitions.discovery import find_job_types, prompt_folders
from aijobs.definitions.registry import JobDefinitionRegistry
from aijobs.events import EventBus
from aijobs.ids import InstanceId
from aijobs.jobs.creation import JobCreation
from aijobs.jobs.lease import LeasePolicy
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.jobs.limits import Limits, Quota, UserLimits
from aijobs.jobs.models import AiJob
from aijobs.jobs.service import AiJobService
from aijobs.jobs.snapshots import SnapshotBuilder
from aijobs.learning.flashcards import FlashcardService
from aijobs.outbox.repository import OutboxRepository
from aijobs.outbox.service import OutboxService
from aijobs.queues.breaker_store import RedisBreakerStore
from aijobs.queues.broker import RedisBroker
from aijobs.queues.call_slots import RedisCallSlots
from aijobs.queues.message import OutgoingMessage
from aijobs.queues.presence import PresenceReader
from aijobs.queues.shared_texts import SharedTexts
from aijobs.settings import Settings
from aijobs.upkeep.dispatcher import hand_over
from aijobs.wiring.definitions import build_registry, check_limits
from aijobs.wiring.providers import _check_cost_quotas, build_costs
from aijobs.wiring.stores import build_credential_store

if TYPE_CHECKING:
    from aijobs.monitor.monitor import Monitor


POOL_SIZE = 10
"""Connections that a process keeps. It may open ten more for a while."""

HOUSEKEEPING = 5
"""Of them, those for other work than attempts: watcher, catch-up, confirming a lost COMMIT."""


@dataclass(frozen=True)
class Services:
    """The services of web, workers and commands. One per process."""

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
        """The reads for people. Loaded when needed, so that a restarted worker is ready sooner."""
        from aijobs.monitor.monitor import Monitor
        from aijobs.monitor.providers import ProviderReads

        providers = ProviderReads(self.clock, self.catalogue, self.breaker, self.call_slots, self.router)
        return Monitor(self.settings, self.database, self.clock, self.registry, self.broker, self.presence, providers)

    def check_start(self) -> None:
        """Raise `SettingsError` if the database has another schema version than this code, its server takes too small
        statements, or stored keys need a key that the ring doesn't hold.

        Leaves no connection open, because servers fork after they imported the application.
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
    """Build everything but workers. Nothing is connected yet. A wrong definition or providers file stops the start and
    is named.

    `workers`: number of jobs that the process runs at once. Its connections suffice for them, so that heartbeats don't
    wait.
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
        registry,
        lifecycle,
        outbox,
        JobCreation(
            database,
            clock,
            lifecycle,
            outbox,
            SnapshotBuilder(clock, timedelta(days=settings.snapshot_days)),
            UserLimits(_limits(settings), Forecaster(router.routes, costs), clock),
            hand_over=hand_over(broker),
            handover_delay=settings.seconds("handover_delay"),
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


def _limits(settings: Settings) -> Limits:
    """Return the limits of one user."""
    s = settings
    return Limits(
        s.user_active_jobs,
        day=Quota(s.quota_day_jobs, s.quota_day_tokens, s.quota_day_cost_micros),
        month=Quota(s.quota_month_jobs, s.quota_month_tokens, s.quota_month_cost_micros),
    )


def _withdraw(broker: RedisBroker) -> Callable[[AiJob, OutgoingMessage | None], None]:
    """Return what follows a requested cancel: a hint for the worker, or the removal of the waiting message."""

    def withdraw(job: AiJob, waiting: OutgoingMessage | None) -> None:
        if job.locked_by is not None:
            broker.hint_cancel(job.id)
        elif waiting is not None:
            broker.remove(waiting)

    return withdraw
