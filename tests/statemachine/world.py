"""A whole deployment in one thread: web, workers, passes, a broker that loses and repeats messages, a manual clock.

Every action takes simple values and does nothing if it has nothing to act on. So a list of (action, values) is a
program that can be stored as JSON and run again on any database.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

from greenlet import getcurrent
from sqlalchemy import delete, select
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from aijobs.ai.billing.usage import UsageLog
from aijobs.ai.calling.gateway import AiGateway
from aijobs.ai.calling.router import ModelRouter
from aijobs.ai.provider import CancellationToken, GenerateAnswer, GenerateRequest, Route
from aijobs.db.clock import ManualClock
from aijobs.definitions.definition import QUEUES, Execution, Queue, RetryBackoff
from aijobs.engine.active_runs import ActiveRuns
from aijobs.engine.attempts import Attempts
from aijobs.engine.end_writes import EndWrites
from aijobs.engine.ending import Ending
from aijobs.engine.engine import ExecutionEngine
from aijobs.engine.execute import Execute
from aijobs.engine.prepare import Prepare
from aijobs.engine.project import Project
from aijobs.engine.resolve import Resolve
from aijobs.engine.run import Run
from aijobs.engine.watcher import Watcher
from aijobs.errors import ApiError, JobError
from aijobs.ids import InstanceId
from aijobs.job_types import flashcard_generation, synthetic
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreatedJob, CreateJobInput
from aijobs.outbox.models import QueuePause
from aijobs.queues.message import JobMessage, OutgoingMessage
from aijobs.settings import Settings
from aijobs.upkeep.cleanup import SnapshotCleanup
from aijobs.upkeep.dispatcher import OutboxDispatcher, hand_over
from aijobs.upkeep.reaper import LockReaper
from aijobs.wiring.passes import build_redrive, build_retention
from aijobs.wiring.providers import build_guard
from aijobs.wiring.services import Services, build_services
from tests.statemachine.faulty import AWAY, FaultyDatabase
from tests.statemachine.flows import (
    COMMIT,
    EVENT,
    PROVIDER,
    Died,
    Flow,
    FlowEvent,
    FlowLock,
    Process,
    VirtualTime,
    one_thread,
    stop,
    this_flow,
)
from tests.support.gateways import health
from tests.support.jobs import BEGIN, KEYS, KitBroker

LEAVE = "leave"
"""Leave the flow stopped at the commit; it may continue later."""

ANSWER = json.dumps(flashcard_generation.SAMPLE_OUTPUT)
JOB_DAYS, TOMBSTONE_DAYS = 180, 365

# Two types that call a provider, one that can't be cancelled, a scripted one, and one that no worker knows.
KINDS = ("cards_soon", "cards_later", "cards_stubborn", "scripted", "unheard_of")
_CARDS = flashcard_generation.DEFINITION
_NOTES = flashcard_generation.SAMPLE_INPUT
_SCRIPTED = {"calls": [{"raise": "PROVIDER_UNAVAILABLE"}, {"output": {"said": "hello"}, "artifacts": 2}]}
DEFINITIONS = (
    replace(
        _CARDS,
        job_type="cards_soon",
        queue=Queue("ai-interactive", 50),
        execution=Execution(60_000, 1, RetryBackoff(1000), abort_strategy="fail"),
    ),
    replace(_CARDS, job_type="cards_later"),
    replace(_CARDS, job_type="cards_stubborn", execution=replace(_CARDS.execution, cancellable=False)),
    replace(synthetic.DEFINITION, job_type="scripted"),
    replace(synthetic.DEFINITION, job_type="unheard_of"),
)
UNKNOWN_TO_WORKERS = "unheard_of"
SEATS = 3
NEED_JOBS = ("cancel", "retry", "refuse", "dispatch", "redrive", "reap", "release_claims")
SLOTS = 2


class Broken(AssertionError):
    """An invariant doesn't hold."""


class ShakyBroker(KitBroker):
    """The broker in memory, which can lose or refuse messages and records those that it delivered."""

    def __init__(self, keys: Any) -> None:
        super().__init__(keys)
        self.handed_out: list[JobMessage] = []
        self.refusals: Counter[str] = Counter()
        """How many more times a job's message is refused."""

    def send(self, messages: Sequence[OutgoingMessage]) -> dict[str, Exception]:
        refused = {m.event_id: ValueError("refused") for m in messages if self.refusals[m.message.job_id] > 0}
        self.refusals.subtract({m.message.job_id: 1 for m in messages if m.event_id in refused})
        return refused | super().send([m for m in messages if m.event_id not in refused])

    def take(self, queue_name: str) -> JobMessage | None:
        message = super().take(queue_name)
        if message is not None:
            self.handed_out.append(message)
        return message

    def lose(self, n: int) -> None:
        """Lose the `n`-th of all waiting messages."""
        places = [(queue, member) for queue in self._queues.values() for member in sorted(queue)]
        if places:
            queue, member = places[n % len(places)]
            del queue[member]

    def waiting(self) -> int:
        """Return the number of messages in all queues."""
        return sum(map(len, self._queues.values()))


@dataclass
class Ledger:
    """A provider that waits for the test to choose its answer, and records every call."""

    world: World
    calls: list[tuple[str, int]] = field(default_factory=list)
    """Job id and attempt number of each call."""
    name: str = "local"

    def generate(self, request: GenerateRequest, token: CancellationToken) -> GenerateAnswer:
        flow = this_flow()
        assert flow is not None, "a call outside any flow"
        assert flow.attempt is not None, "a call outside any attempt"
        lease = flow.attempt.lease
        self.world.note_purchase(lease.job_id)
        self.calls.append((lease.job_id, lease.attempt_no))
        outcome = stop(PROVIDER) or "ok"
        if outcome == "aborted":
            token.raise_if_cancelled()
            outcome = "PROVIDER_CONNECTION_LOST"
        if outcome.isupper():
            raise JobError(outcome, "scripted", faults=("say it otherwise",))
        return GenerateAnswer(
            text=ANSWER if outcome == "ok" else "no JSON",
            provider=self.name,
            model="m",
            prompt_tokens=10,
            completion_tokens=5,
            cached_tokens=0,
            estimated=False,
            finish_reason="stop",
        )


class _Silent:
    def started(self, job_id: str) -> None:
        """Do nothing."""

    def finished(self, job_id: str) -> None:
        """Do nothing."""


class _FlowPrepare(Prepare):
    """Gives attempts locks and events that stop a flow instead of the thread."""

    def take(self, message: JobMessage, *, suspects: bool = True) -> Run | None:
        run = super().take(message, suspects=suspects)
        if run is not None:
            run.end_lock, run.ended = FlowLock(), FlowEvent()  # type: ignore[assignment]
        return run


ROUTER = ModelRouter({"local": (Route("local", "m"),)}, default="local")


class Worker(Process):
    """One consumer process: an engine with its watcher and `SLOTS` slots."""

    def __init__(self, world: World, seat: int, generation: int) -> None:
        super().__init__(f"worker-{seat}.{generation}")
        # Same pid, another random part: the next process of this seat sees that this one is dead.
        self.instance = InstanceId("model", "boot", f"ns{seat}", os.getpid(), "1", f"g{generation}")
        self.active, self.watcher, self.engine = self._build(world)

    def _build(self, world: World) -> tuple[ActiveRuns, Watcher, ExecutionEngine]:
        s, usage = world.workers_services, UsageLog(world.clock)
        writes = EndWrites(s.database, s.clock, s.lifecycle, usage, patience=timedelta(hours=1), chance=lambda: 0.0)
        ending = Ending(s.lifecycle, writes)
        active = ActiveRuns(ending, _Silent())
        watcher = Watcher(
            s.database,
            s.lifecycle,
            s.broker,
            active,
            ending,
            abandon=self._abandon,
            heartbeat_s=s.settings.heartbeat_s,
            watch_s=s.settings.watcher_s,
            stuck_s=s.settings.stuck_attempt_s,
        )
        prepare = _FlowPrepare(
            s.database,
            s.clock,
            s.registry,
            s.lifecycle,
            s.outbox_events,
            str(self.instance),
            put_back=hand_over(s.broker),
        )
        gateway = AiGateway([world.ledger], {}, s.breaker, s.call_slots)
        attempts = Attempts(
            Resolve(s.database, s.prompts, ROUTER, s.credentials),
            Execute(s.database, s.lifecycle, gateway, usage, s.costs, build_guard(s.settings)),
            Project(s.database, s.lifecycle, s.registry),
            ending,
        )
        return active, watcher, ExecutionEngine(prepare, attempts, active, watcher)

    def _abandon(self) -> None:
        self.alive = False
        raise Died

    def slots_used(self) -> int:
        return sum(flow.name == "slot" for flow in self.live_flows())


def _check(worker: Any) -> None:
    """Run one check as the watcher's loop does: after a database error, the next check tries again."""
    with suppress(SQLAlchemyError):
        worker.watcher.check()


class World:
    """The deployment. The public methods up to `refuse` are the actions."""

    def __init__(self, database: FaultyDatabase, clock: ManualClock) -> None:
        self.database, self.clock, self.hub = database, clock, getcurrent()
        self.broker = ShakyBroker(KEYS)
        self.ledger = Ledger(self)
        self.services = self._build_services()
        for definition in DEFINITIONS:
            self.services.registry.register(definition)
        workers = self._build_services()
        for definition in DEFINITIONS:
            if definition.job_type != UNKNOWN_TO_WORKERS:
                workers.registry.register(definition)
        self.workers_services = workers
        s = self.services
        self.dispatcher = OutboxDispatcher(s.database, s.outbox_events, s.lifecycle, s.broker, "model/dispatcher")
        self.reaper = LockReaper(s.database, s.lifecycle)
        self.redriver, self.retention = build_redrive(s), build_retention(s)
        self.cleanup_pass = SnapshotCleanup(s.database, s.clock)
        self._generations = count(1)
        self.workers = [Worker(self, seat, next(self._generations)) for seat in range(SEATS)]
        self.others: list[Process] = []
        """Processes of stopped requests and passes."""
        self.promised_cancels: set[str] = set()
        self.promised_jobs: set[str] = set()
        self.promised_keys: dict[tuple[str, str, str | None], str] = {}
        self.gone_at: dict[str, datetime] = {}
        """The time at which each deleted job was first found missing."""
        self._has_jobs, self.paused, self.aged = False, False, False
        self.violations: list[str] = []
        self.program: list[tuple[str, dict[str, Any]]] = []

    def _build_services(self) -> Services:
        settings = Settings(
            instance_path=Path("/nonexistent"),
            database_url="model",
            secret_key="s" * 32,
            jwt_secret="j" * 32,
            message_keys=KEYS,
            job_days=JOB_DAYS,
            tombstone_days=TOMBSTONE_DAYS,
            user_active_jobs=0,
        )
        broker: Any = self.broker
        return build_services(settings, database=self.database, clock=self.clock, broker=broker, **health())

    def act(self, name: str, **values: Any) -> None:
        """Perform an action by its name, and record it in the program."""
        self.program.append((name, values))
        getattr(self, name)(**values)
        self._let_slots_go()

    # --- requests ------------------------------------------------------------------------------------------------

    def create(self, user: int, kind: int, key: int | None, variant: int, plan: str) -> None:
        """Request a job; with a key, it may be a repeat or a conflicting request."""
        job_type = KINDS[kind]
        cards = kind < 3
        request = CreateJobInput(
            user_id=f"u{user}",
            job_type=job_type,
            target_type="note",
            target_id=f"n{variant}",
            input=_NOTES if cards else _SCRIPTED,
            idempotency_key=None if key is None else f"k{key}",
        )
        by_key = (request.user_id, job_type, request.idempotency_key)

        def create() -> None:
            try:
                made = self.services.jobs.create_job(request)
            except ApiError as refused:
                if key is None or refused.code != "IDEMPOTENCY_KEY_REUSED":
                    raise Broken(f"create was refused: {refused.code} {refused.details}") from refused
                return
            self._promise(made)
            if key is not None:
                known = self.promised_keys.setdefault(by_key, made.job.id)
                if known != made.job.id and not self._is_forgotten(known):
                    raise Broken(f"one key led to the jobs {known} and {made.job.id}")
                self.promised_keys[by_key] = made.job.id

        self._has_jobs = True
        self._run_alone("create", create, plan)

    def _is_forgotten(self, job_id: str) -> bool:
        """Return whether the tombstone of a deleted job may be gone too."""
        gone_at = self.gone_at.get(job_id)
        return gone_at is not None and self.clock.at - gone_at >= timedelta(days=TOMBSTONE_DAYS)

    def cancel(self, n: int, plan: str) -> None:
        """Request a cancel of the `n`-th job."""
        if (job := self._nth_job(n)) is None:
            return

        def cancel() -> None:
            try:
                after = self.services.jobs.cancel(job.id, "user:model")
            except ApiError as refused:
                if not self._may_refuse_cancel(job, refused.code):
                    raise Broken(f"cancel of {job.id} was refused: {refused.code}") from refused
                return
            if after.cancel_requested_at is not None:
                self.promised_cancels.add(job.id)

        self._run_alone("cancel", cancel, plan)

    def _may_refuse_cancel(self, job: AiJob, code: str) -> bool:
        if code == "JOB_NOT_CANCELLABLE":
            return job.job_type == "cards_stubborn"
        return code == "JOB_NOT_FOUND" and self.job(job.id) is None

    def retry(self, n: int, plan: str) -> None:
        """Request a retry of the `n`-th job."""
        if (job := self._nth_job(n)) is None:
            return

        def retry() -> None:
            try:
                self._promise(self.services.jobs.retry(job.id, "operator:model"))
            except ApiError as refused:
                if refused.code not in ("JOB_NOT_RETRYABLE", "JOB_NOT_FOUND"):
                    raise Broken(f"retry of {job.id} was refused: {refused.code}") from refused

        self._run_alone("retry", retry, plan)

    def _promise(self, made: CreatedJob) -> None:
        self.promised_jobs.add(made.job.id)

    def pause(self, queue: int) -> None:
        """Pause a queue."""
        name = sorted(QUEUES)[queue]
        with self.database.transaction() as session:
            session.merge(QueuePause(queue_name=name, reason="model", paused_by="model", paused_at=self.clock.at))
        self.paused = True

    def resume(self) -> None:
        """Resume all queues."""
        with self.database.transaction() as session:
            session.execute(delete(QueuePause))
        self.paused = False

    # --- passes --------------------------------------------------------------------------------------------------

    def dispatch(self, plan: str) -> None:
        """Run one cycle of the dispatcher."""
        self._run_alone("dispatcher", self.dispatcher.cycle, plan)

    def release_claims(self, plan: str) -> None:
        """Release the claims of dead dispatchers."""
        self._run_alone("claim_release", self.dispatcher.release_expired_claims, plan)

    def redrive(self, plan: str) -> None:
        """Send lost messages again."""
        self._run_alone("redrive", self.redriver.run, plan)

    def reap(self, plan: str) -> None:
        """Take expired leases."""
        self._run_alone("reaper", self.reaper.reap, plan)

    def prune(self, plan: str) -> None:
        """Delete old rows."""
        self._run_alone("retention", self.retention.run, plan)

    def clean_snapshots(self, plan: str) -> None:
        """Delete expired snapshots."""
        self._run_alone("cleanup", self.cleanup_pass.run, plan)

    # --- workers -------------------------------------------------------------------------------------------------

    def deliver(self, seat: int, queue: int, plan: str) -> None:
        """Give the next message of a queue, or of the other queue, to a free slot of a worker."""
        if self.broker.away or (worker := self._free(seat)) is None:
            return
        queues = sorted(QUEUES)
        message = self.broker.take(queues[queue]) or self.broker.take(queues[1 - queue])
        if message is not None:
            self._start_slot(worker, message, plan)

    def deliver_again(self, seat: int, n: int, plan: str) -> None:
        """Deliver a message for the second time, perhaps to another worker."""
        if self.broker.handed_out and (worker := self._free(seat)):
            self._start_slot(worker, self.broker.handed_out[n % len(self.broker.handed_out)], plan)

    def _free(self, seat: int) -> Worker | None:
        """Return the worker in this seat, or the next one with a free slot."""
        for worker in (*self.workers[seat:], *self.workers[:seat]):
            if worker.alive and worker.slots_used() < SLOTS:
                return worker
        return None

    def _start_slot(self, worker: Worker, message: JobMessage, plan: str) -> None:
        slot = Flow(worker, "slot", lambda: worker.engine.execute(message), self.hub)
        self._run(slot, plan)

    def go_on(self, n: int, order: str) -> None:
        """Continue one stopped flow to its next stop, unless it waits for the provider."""
        flows = [flow for flow in self._flows() if flow.can_go and flow.why != PROVIDER]
        if flows:
            self._step(flows[n % len(flows)], order or None)

    def answer(self, n: int, outcome: str) -> None:
        """Answer one of the waiting provider calls."""
        flows = [flow for flow in self._flows() if flow.why == PROVIDER]
        if flows:
            self._step(flows[n % len(flows)], outcome)

    def work(self, n: int, outcome: str, plan: str) -> None:
        """Run one attempt to its end, even if it has lost its lease."""
        attempts = [flow for flow in self._flows() if flow.attempt is not None]
        if attempts:
            self._run(attempts[n % len(attempts)], plan, outcome)

    def watch(self, seat: int, plan: str) -> None:
        """Run one check of a worker's watcher: renewals, cancels, deadlines."""
        worker = next((w for w in (*self.workers[seat:], *self.workers[:seat]) if w.active.all()), self.workers[seat])
        if worker.alive and not any(flow.name == "watcher" for flow in worker.live_flows()):
            self._run(Flow(worker, "watcher", lambda: _check(worker), self.hub), plan)

    def drain(self, seat: int, plan: str) -> None:
        """Stop a worker: it releases its leases and exits."""
        worker = self.workers[seat]
        if not worker.alive:
            return
        self._run(Flow(worker, "drain", lambda: worker.engine.drain(0), self.hub), plan)
        if not any(flow.name == "drain" for flow in worker.live_flows()):
            worker.die()

    def kill(self, seat: int) -> None:
        """Kill a worker."""
        self.workers[seat].die()

    def restart(self, seat: int, plan: str) -> None:
        """Start a new worker in a dead one's seat; it takes the dead one's leases."""
        if self.workers[seat].alive:
            return
        worker = self.workers[seat] = Worker(self, seat, next(self._generations))

        def catch_up() -> None:
            self.reaper.reap_dead(worker.instance)
            for queue in QUEUES:
                self.redriver.run(queue, due_for=timedelta())

        self._run(Flow(worker, "catch_up", catch_up, self.hub), plan)

    # --- environment ---------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Advance the clock by seconds."""
        self.clock.advance(timedelta(seconds=seconds))

    def pass_days(self, days: float) -> None:
        """Advance the clock by days."""
        self.aged = True
        self.clock.advance(timedelta(days=days))

    def lose(self, n: int) -> None:
        """Lose one message of the broker."""
        self.broker.lose(n)

    def flush(self) -> None:
        """Lose all messages of the broker."""
        self.broker.lose_all()

    def cut_broker(self) -> None:
        """Make the broker unavailable."""
        self.broker.away = True

    def mend_broker(self) -> None:
        """Make the broker available again, with its messages."""
        self.broker.away = False

    def refuse(self, n: int, times: int) -> None:
        """Refuse the next messages of one job."""
        if (job := self._nth_job(n)) is not None:
            self.broker.refusals[job.id] = times

    # --- running flows -------------------------------------------------------------------------------------------

    def _run_alone(self, name: str, work: Callable[[], Any], plan: str) -> None:
        """Run a request or a pass in a process of its own."""
        process = Process(name)
        self._run(Flow(process, name, work, self.hub), plan)
        if process.live_flows():
            self.others.append(process)

    def _run(self, flow: Flow, plan: str, outcome: str = "ok") -> None:
        """Run a flow until it ends or has to wait.

        `plan` is empty or `{n}:{fault}`: inject the fault at the flow's n-th commit from here, counted from 0.
        """
        at, _, fault = plan.partition(":")
        commits = 0
        while flow.can_go:
            order = outcome if flow.why == PROVIDER else None
            if flow.why == COMMIT:
                if fault and commits == int(at):
                    if fault == LEAVE:
                        return
                    order = fault
                commits += 1
            self._step(flow, order)

    def _step(self, flow: Flow, order: str | None = None) -> None:
        if order == AWAY:
            flow.may_fail = True
        flow.go(order)
        if flow.dead and flow.error is not None:
            if isinstance(flow.error, DBAPIError) and flow.may_fail:
                return
            raise flow.error

    def _let_slots_go(self) -> None:
        for worker in self.workers:
            for flow in worker.live_flows():
                if flow.why == EVENT and flow.can_go:
                    self._step(flow)
            if any(f.name == "drain" and f.dead for f in worker.flows):
                worker.die()

    def _flows(self) -> list[Flow]:
        """Return the stopped flows, workers' first, without slots that wait for their attempt."""
        processes: list[Process] = [*self.workers, *self.others]
        return [flow for process in processes for flow in process.live_flows() if flow.why != EVENT]

    # --- reading -------------------------------------------------------------------------------------------------

    def job(self, job_id: str) -> AiJob | None:
        """Return the job's current row, if it exists."""
        with self.database.read() as session:
            return session.get(AiJob, job_id)

    def _nth_job(self, n: int) -> AiJob | None:
        with self.database.read() as session:
            jobs = session.execute(select(AiJob).order_by(AiJob.id)).scalars().all()
        return jobs[n % len(jobs)] if jobs else None

    def note_purchase(self, job_id: str) -> None:
        """Record a violation if the job, or another one of its chain, has a saved answer already."""
        with self.database.read() as session:
            root = session.execute(select(AiJob.root_id).where(AiJob.id == job_id)).scalar_one()
            saved = session.execute(
                select(AiJob.id).where(AiJob.root_id == root, AiJob.output_hash.is_not(None))
            ).scalar()
        if saved is not None:
            self.violations.append(f"{saved} has a saved answer, and {job_id} buys another")

    def waiting(self) -> int:
        """Return the number of messages in the broker."""
        return self.broker.waiting()

    def can(self, name: str) -> bool:
        """Return whether an action has something to act on."""
        if name == "answer":
            return any(flow.why == PROVIDER for flow in self._flows())
        if name == "watch":
            return any(worker.alive and worker.active.all() for worker in self.workers)
        if name == "work":
            return any(flow.attempt is not None for flow in self._flows())
        if name == "go_on":
            return any(flow.why != PROVIDER for flow in self._flows())
        if name in ("prune", "clean_snapshots"):
            return self.aged
        if name in NEED_JOBS:
            return self._has_jobs
        if name in ("lose", "flush"):
            return self.broker.waiting() > 0
        if name == "deliver":
            return self.broker.waiting() > 0 and not self.broker.away
        if name in ("cut_broker", "mend_broker"):
            return self.broker.away == (name == "mend_broker")
        if name == "resume":
            return self.paused
        if name == "deliver_again":
            return bool(self.broker.handed_out)
        if name == "restart":
            return not all(worker.alive for worker in self.workers)
        return True

    # --- end -----------------------------------------------------------------------------------------------------

    def heal(self) -> Iterator[int]:
        """Run the world without faults, and yield the number of each round. The rounds get longer."""
        self.broker.away, self.broker.refusals = False, Counter()
        self.resume()
        for number in count():
            self._healthy_round()
            yield number
            self.advance(5 if number < 12 else 31 if number < 24 else 1300)

    def _healthy_round(self) -> None:
        for seat, worker in enumerate(self.workers):
            if not worker.alive:
                self.restart(seat, "")
        for flow in self._flows():
            self._run(flow, "")
        self._let_slots_go()
        for a_pass in (self.dispatch, self.release_claims, self.reap, self.redrive):
            a_pass("")
        for seat in range(SEATS):
            self.watch(seat, "")
            for queue in range(len(QUEUES)):
                while self.workers[seat].alive and (message := self.broker.take(sorted(QUEUES)[queue])):
                    self._start_slot(self.workers[seat], message, "")
                    for flow in self._flows():
                        self._run(flow, "")
                    self._let_slots_go()

    def close(self) -> None:
        """End every process."""
        for process in (*self.workers, *self.others):
            process.die()


@contextmanager
def open_world(database: FaultyDatabase) -> Iterator[World]:
    """Open a new world over an emptied database."""
    clock = ManualClock(BEGIN)
    with one_thread(VirtualTime(clock, BEGIN)):
        database.wipe()
        world = World(database, clock)
        try:
            yield world
        finally:
            world.close()
