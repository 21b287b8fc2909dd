"""Build the crews of consumers: for job queues, and for maintenance."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from threading import Thread

from aijobs.ai.providers.openai_compatible import load_client
from aijobs.credentials.rotation import CredentialRotation
from aijobs.definitions.definition import MAINTENANCE_QUEUE
from aijobs.ids import InstanceId
from aijobs.queues.crew import Crew, Pass
from aijobs.queues.presence import BEAT_S, Presence
from aijobs.upkeep.cleanup import SnapshotCleanup
from aijobs.upkeep.dispatcher import OutboxDispatcher
from aijobs.upkeep.pass_log import PassLog
from aijobs.upkeep.reaper import LockReaper
from aijobs.upkeep.redrive import Redrive
from aijobs.upkeep.retention import Retention
from aijobs.wiring.engine import build_engine
from aijobs.wiring.services import Services


def build_job_crew(
    services: Services, queue_name: str, abandon: Callable[[], None], *, workers: int | None = None
) -> Crew:
    """Build the crew of a job queue. `workers`: number of jobs that it runs at once, for its heartbeat."""
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
            # In the background, so that the worker takes jobs at once. The first job that calls a server waits for it.
            Thread(target=load_client, name="load-client", daemon=True).start()

    def take_over() -> None:
        if reaper.reap_dead(instance) or reaper.finds_hidden(instance):
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
    """Build the crew of the maintenance queue: the passes."""
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
        catch_up=(lambda: reaper.reap_dead(instance),),
        drain=lambda grace_s: presence.leave(),
    )


def build_presence(services: Services, instance: InstanceId, queue_name: str, workers: int | None = None) -> Presence:
    """Build the heartbeat of one consumer process, often enough for the key's lifetime."""
    beat_s = min(services.settings.heartbeat_s, BEAT_S)
    return Presence(services.broker.client, instance, queue_name, slots=workers, beat_s=beat_s)


def build_retention(services: Services, progress: Callable[[], None] = lambda: None) -> Retention:
    """Build the pass that deletes old jobs, and sessions of operators."""
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
    """Build the rotation of users' stored keys."""
    return CredentialRotation(services.database, services.credential_store)


def build_redrive(services: Services, progress: Callable[[], None] = lambda: None) -> Redrive:
    """Build the pass that finds lost messages."""
    s, due_for = services, services.settings.seconds("redrive_due")
    return Redrive(s.database, s.clock, s.outbox_events, s.broker, due_for=due_for, progress=progress)
