"""The unmodified `huey_consumer` over our queues and a real Valkey."""

from __future__ import annotations

import json
import pickle
import random
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huey import PriorityRedisHuey

from aijobs.queues.broker import RedisBroker, queue_key
from aijobs.queues.codec import encode_member
from aijobs.queues.connection import ACL_RULES
from aijobs.queues.crew import Crew
from aijobs.queues.hueys import AiJobsHuey, MessageSerializer
from aijobs.queues.message import JobMessage, OutgoingMessage
from aijobs.settings import KeyRing, Settings
from tests.support.messages import KEYS, SECRET, outgoing
from tests.support.polling import poll
from tests.support.ports import free_port
from tests.support.processes import Processes, Program, Run
from tests.support.servers import ValkeyServer

PROJECT = Path(__file__).parents[3]
HUEY_CONSUMER = Path(sys.executable).with_name("huey_consumer")
INTERACTIVE = "ai-interactive"


class Stage:
    """A folder with a diary and settings, in which consumers are started."""

    def __init__(self, processes: Processes, folder: Path, redis_url: str) -> None:
        self._processes, self._folder = processes, folder
        self.env = {
            "AIJOBS_INSTANCE_PATH": str(folder),
            "AIJOBS_MESSAGE_KEYS": f"k1:{SECRET}",
            "AIJOBS_REDIS_URL": redis_url,
            "QUEUE_APP_DIARY": str(folder / "diary"),
        }
        self.broker = RedisBroker.from_settings(Settings(redis_url=redis_url, message_keys=KEYS))

    def start(self, queue: str = "interactive", *options: str, **env: str) -> Program:
        """Start a consumer of one of the queue app's queues."""
        return self._processes.spawn(
            [HUEY_CONSUMER, f"tests.support.queue_app.{queue}", *options],
            env={**self.env, **env},
            cwd=PROJECT,
        )

    def start_and_wait(self, *options: str, **env: str) -> Program:
        consumer = self.start("interactive", *options, **env)
        consumer.wait_for_output("Huey consumer started", timeout=30)
        return consumer

    def diary(self) -> list[str]:
        path = self._folder / "diary"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, line: str, count: int = 1) -> None:
        poll(lambda: self.diary().count(line) >= count, timeout=30, what=f"{line!r} in the diary")

    def let_slow_jobs_go(self) -> None:
        (self._folder / "go").touch()

    def send(self, job_type: str = "quick", **changes: Any) -> OutgoingMessage:
        message = outgoing(job_type=job_type, **changes)
        assert self.broker.send([message]) == {}
        return message


def events(consumer: Program, name: str) -> list[dict[str, Any]]:
    """Return the consumer's log lines of this event; every line of its output must be JSON."""
    lines = [json.loads(line) for line in consumer.output.splitlines()]
    return [line for line in lines if line["event"] == name]


@pytest.fixture
def stage(processes: Processes, run: Run, redis_url: str) -> Stage:
    return Stage(processes, run.new_folder("stage"), redis_url)


def test_sigterm_ends_a_child_that_a_job_forked(stage: Stage) -> None:
    stage.start_and_wait("-w", "2")

    message = stage.send("forks")
    stage.wait_for(f"ends {message.message.job_id}")

    assert f"child ended with -{int(signal.SIGTERM)}" in stage.diary()


# --- messages -------------------------------------------------------------------------------------------


def test_unmodified_consumer_runs_a_job_once(stage: Stage) -> None:
    consumer = stage.start_and_wait("-w", "2")

    message = stage.send()
    stage.wait_for(f"ends {message.message.job_id}")

    assert stage.diary() == [
        "crew started",
        f"begins {message.message.job_id}",
        f"ends {message.message.job_id}",
    ]
    assert consumer.stop() == 0


def test_bad_messages_are_logged_once_per_reason_and_the_next_job_runs(stage: Stage, valkey: ValkeyServer) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return open, (f"{stage.env['QUEUE_APP_DIARY']}-pickle-was-run",)

    good = encode_member(outgoing(), KEYS)
    junk = [
        b"",
        b"short",
        b"\x00" * 40,
        good[:-1],
        good[:8] + pickle.dumps(Bomb()),
        good[:8] + b"canary-of-content" + b"{" * (5 * 1024 * 1024),
        good.replace(b'"task":"run_job"', b'"task":"os.remove"'),
        encode_member(outgoing(queue_name="ai-background"), KEYS),
        encode_member(outgoing(message_key_id="k9"), KeyRing.parse(f"k9:{SECRET}", "test")),
    ]
    with valkey.client() as admin:
        for member in junk:
            admin.zadd(queue_key(INTERACTIVE), {member: -1000})
    message = stage.send()

    consumer = stage.start_and_wait("-w", "1")
    stage.wait_for(f"ends {message.message.job_id}")

    refused = events(consumer, "message.refused")
    reasons = {line["reason"] for line in refused}
    assert len(refused) == len(reasons) < len(junk), "one line a minute for each reason"
    assert {"too long", "not a signed message", "unknown key", "wrong signature"} <= reasons
    assert {line["level"] for line in refused} == {"error"}
    assert "canary-of-content" not in consumer.output
    assert len(consumer.output) < 20_000
    assert not Path(f"{stage.env['QUEUE_APP_DIARY']}-pickle-was-run").exists()
    assert consumer.is_running


def test_error_of_a_job_is_logged_without_its_text_and_the_next_job_runs(stage: Stage) -> None:
    consumer = stage.start_and_wait()

    stage.send("raises", priority=0)
    message = stage.send()
    stage.wait_for(f"ends {message.message.job_id}")

    (failed,) = events(consumer, "message.failed")
    assert failed["error"] == "ValueError"
    assert "canary-of-content" not in consumer.output


def test_plain_huey_with_our_serializer_runs_our_messages(redis_url: str) -> None:
    settings = Settings(redis_url=redis_url, message_keys=KEYS)
    queue = AiJobsHuey(INTERACTIVE, lambda _: Crew(), load_settings=lambda: settings)
    queue.add_job_task()
    plain = PriorityRedisHuey("aijobs_interactive", serializer=MessageSerializer(queue), results=False, url=redis_url)
    got: list[tuple[Any, ...]] = []

    def run_job(*args: Any) -> None:
        got.append(args)

    run_job.__module__ = __name__
    plain.task(name="run_job")(run_job)
    message = outgoing()
    RedisBroker.from_settings(settings).send([message])

    task = plain.dequeue()
    plain.execute(task)

    assert task.id == f"aj-{message.event_id}"
    assert task.name == "run_job"
    assert isinstance(task.args, tuple)
    assert [set(args[0]) for args in got] == [{"jobId", "jobType", "idempotencyKey", "createdAt"}]


def test_worker_receives_the_event_id_of_a_message(redis_url: str) -> None:
    settings = Settings(redis_url=redis_url, message_keys=KEYS)
    got: list[JobMessage] = []
    queue = AiJobsHuey(INTERACTIVE, lambda _: Crew(run_job=got.append), load_settings=lambda: settings)
    queue.add_job_task()
    queue.gather_crew()
    sent = outgoing()
    RedisBroker.from_settings(settings).send([sent])

    queue.execute(queue.dequeue())

    assert [(message, message.event_id) for message in got] == [(sent.message, sent.event_id)]


def test_consumer_leaves_no_key_in_redis(stage: Stage, valkey: ValkeyServer) -> None:
    stage.start_and_wait()
    done = stage.send()
    stage.wait_for(f"ends {done.message.job_id}")

    with valkey.client() as admin:
        assert admin.keys("*") == []


def test_sending_through_huey_is_refused(redis_url: str) -> None:
    settings = Settings(redis_url=redis_url, message_keys=KEYS)
    queue = AiJobsHuey(INTERACTIVE, lambda _: Crew(), load_settings=lambda: settings)
    task = queue.add_job_task()

    with pytest.raises(Exception, match="outbox"):
        task({})
    with pytest.raises(Exception, match="outbox"):
        queue.serializer.serialize(("anything",))


# --- ending ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_stop_waits_for_the_running_job_and_takes_no_other(stage: Stage, signal_number: signal.Signals) -> None:
    consumer = stage.start_and_wait("-w", "1")
    running = stage.send("slow")
    stage.wait_for(f"begins {running.message.job_id}")

    consumer.send_signal(signal_number)
    consumer.wait_for_output("Shutting down gracefully")
    waiting = stage.send()
    stage.let_slow_jobs_go()

    assert consumer.wait() == 0
    assert stage.diary() == [
        "crew started",
        f"begins {running.message.job_id}",
        f"ends {running.message.job_id}",
        "drained",
    ]
    assert stage.broker.find_missing([waiting]) == set()


def test_message_popped_during_a_stop_is_put_back(stage: Stage) -> None:
    consumer = stage.start_and_wait("-w", "2")  # Both threads wait at the broker for up to a second.

    consumer.send_signal(signal.SIGTERM)
    consumer.wait_for_output("Shutting down gracefully")
    waiting = [stage.send(priority=n) for n in range(3)]

    assert consumer.wait() == 0
    assert stage.broker.find_missing(waiting) == set()
    assert not [line for line in stage.diary() if line.startswith("begins")]


def test_job_that_runs_beyond_the_grace_time_is_released_and_the_exit_code_is_0(stage: Stage) -> None:
    consumer = stage.start_and_wait("-w", "2", AIJOBS_SHUTDOWN_GRACE_S="1")
    first, second = stage.send("slow"), stage.send("slow")
    for message in (first, second):
        stage.wait_for(f"begins {message.message.job_id}")

    consumer.send_signal(signal.SIGTERM)

    assert consumer.wait() == 0
    assert sorted(stage.diary()[-3:]) == sorted(
        ["drained", f"released {first.message.job_id}", f"released {second.message.job_id}"]
    )


def test_second_sigterm_changes_nothing(stage: Stage) -> None:
    consumer = stage.start_and_wait("-w", "1")
    running = stage.send("slow")
    stage.wait_for(f"begins {running.message.job_id}")

    consumer.send_signal(signal.SIGTERM)
    consumer.wait_for_output("Shutting down gracefully")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        consumer.send_signal(number)
    stage.let_slow_jobs_go()

    assert consumer.wait() == 0
    assert stage.diary()[-2:] == [f"ends {running.message.job_id}", "drained"]


def test_abandoned_process_releases_its_jobs_and_exits_with_75(stage: Stage) -> None:
    consumer = stage.start_and_wait("-w", "2", "-t", "1")
    other = stage.send("slow")
    stage.wait_for(f"begins {other.message.job_id}")

    stuck = stage.send("abandons")

    assert consumer.wait(20) == 75
    assert f"released {other.message.job_id}" in stage.diary()
    assert f"released {stuck.message.job_id}" in stage.diary()
    assert len(events(consumer, "consumer.abandoned")) == 1


def test_failed_catch_up_is_logged_and_delays_nothing(stage: Stage) -> None:
    consumer = stage.start_and_wait()

    message = stage.send()
    stage.wait_for(f"ends {message.message.job_id}")

    caught_up = Path(stage.env["QUEUE_APP_DIARY"]).with_name("caught-up")
    poll(caught_up.exists, what="the second catch-up")
    (failed,) = events(consumer, "consumer.catch_up_failed")
    assert failed["error"] == "ValueError"
    assert "canary-of-content" not in consumer.output


def test_sighup_restarts_the_process_under_its_pid(stage: Stage) -> None:
    consumer = stage.start_and_wait()
    stage.wait_for("crew started")

    consumer.send_signal(signal.SIGHUP)
    stage.wait_for("crew started", count=2)

    message = stage.send()
    stage.wait_for(f"ends {message.message.job_id}")
    assert consumer.is_running
    assert stage.diary()[1] == "drained"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_stops_at_random_moments_lose_or_double_no_job(stage: Stage) -> None:
    chance = random.Random(20260131)
    sent: list[str] = []
    for _ in range(40):
        consumer = stage.start_and_wait("-w", "2")
        stop_after = chance.randrange(1, 60)
        for number in range(80):
            if number == stop_after:
                consumer.send_signal(signal.SIGTERM)
            sent.append(stage.send().message.job_id)
        assert consumer.wait() == 0

    stage.start_and_wait("-w", "2")
    poll(lambda: stage.broker.pending_count(INTERACTIVE) == 0, timeout=30, what="the queue is empty")
    poll(lambda: len([line for line in stage.diary() if line.startswith("ends")]) >= len(sent))
    for word in ("begins", "ends"):
        assert sorted(line for line in stage.diary() if line.startswith(word)) == sorted(
            f"{word} {job_id}" for job_id in sent
        )


# --- refusing -------------------------------------------------------------------------------------------


def refusal(consumer: Program) -> str:
    assert consumer.wait(30) == 1
    (line,) = consumer.output.splitlines()
    return line


@pytest.mark.parametrize(
    ("options", "env", "said"),
    [
        ((), {"AIJOBS_LEASE_S": "soon"}, "AIJOBS_LEASE_S is 'soon'"),
        ((), {"AIJOBS_MESSAGE_KEYS": "short"}, "AIJOBS_MESSAGE_KEYS"),
        ((), {"AIJOBS_ENV": "production"}, "production refuses to start on development keys"),
        ((), {"AIJOBS_REDIS_URL": "localhost:6379"}, "AIJOBS_REDIS_URL can't be read"),
        ((), {"AIJOBS_REDIS_URL": ""}, "no broker"),
        ((), {"QUEUE_APP_SCHEMA": "old"}, "the schema is old: run `aijobs db upgrade`"),
        (("-k", "process"), {}, "only threads are supported"),
        (("-w", "0"), {}, "-w 0: it is 1 or more"),
    ],
)
def test_misconfigured_consumer_refuses_to_start_in_one_line(
    stage: Stage, options: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    line = refusal(stage.start("interactive", *options, **env))

    assert line.startswith("aijobs: ")
    assert said in line


def test_maintenance_consumer_without_passes_is_refused_in_one_line(stage: Stage) -> None:
    assert "leave -n out" in refusal(stage.start("maintenance", "-n"))


def test_embedded_broker_that_does_not_run_is_refused_in_one_line(stage: Stage) -> None:
    instance = Path(stage.env["AIJOBS_INSTANCE_PATH"])
    (instance / "broker.json").write_text(json.dumps({"url": f"unix://{instance}/gone.sock", "pid": 1}))

    line = refusal(stage.start(AIJOBS_REDIS_URL=""))

    assert "nobody listens" in line
    assert "aijobs up" in line


# --- Redis outages ----------------------------------------------------------------------------------------


def test_consumer_started_before_its_broker_waits_for_it(
    processes: Processes, run: Run, start_valkey: Callable[..., ValkeyServer]
) -> None:
    server = start_valkey()
    server.stop()
    stage = Stage(processes, run.new_folder("stage"), server.url)
    consumer = stage.start_and_wait()
    poll(lambda: events(consumer, "broker.away"), what="the outage is logged")

    server.start()
    message = stage.send()

    stage.wait_for(f"ends {message.message.job_id}")
    assert len(events(consumer, "broker.away")) == 1
    assert len(events(consumer, "broker.back")) == 1


@pytest.mark.parametrize("trouble", ["stopped", "frozen", "read-only", "full"])
def test_broker_outage_is_logged_once_at_its_start_and_once_at_its_end(
    processes: Processes, run: Run, start_valkey: Callable[..., ValkeyServer], trouble: str
) -> None:
    server = start_valkey()
    stage = Stage(processes, run.new_folder("stage"), server.url)
    consumer = stage.start_and_wait("-w", "2")
    first = stage.send()
    stage.wait_for(f"ends {first.message.job_id}")

    if trouble == "stopped":
        server.stop()
    elif trouble == "frozen":
        server.freeze()
    with server.client() as admin:
        if trouble == "read-only":
            admin.replicaof("127.0.0.1", str(free_port()))
        elif trouble == "full":
            admin.config_set("maxmemory", "1")
        if trouble != "full":  # A full broker still delivers messages.
            poll(lambda: events(consumer, "broker.away"), what="the outage is logged")
        if trouble == "read-only":
            admin.replicaof("NO", "ONE")
        elif trouble == "full":
            admin.config_set("maxmemory", "0")
    if trouble == "stopped":
        server.start()
    elif trouble == "frozen":
        server.thaw()
    if trouble != "full":
        poll(lambda: events(consumer, "broker.back"), what="the end of the outage is logged")

    second = stage.send()
    stage.wait_for(f"ends {second.message.job_id}")
    assert len(events(consumer, "broker.away")) == len(events(consumer, "broker.back")) <= 1
    assert "Traceback" not in consumer.output
    assert consumer.is_running


def test_consumer_works_under_the_documented_acl_rules(
    processes: Processes, run: Run, start_valkey: Callable[..., ValkeyServer]
) -> None:
    server = start_valkey(f"user aijobs on >secret {ACL_RULES}")
    stage = Stage(processes, run.new_folder("stage"), server.url_for("aijobs", "secret"))
    consumer = stage.start_and_wait()

    message = stage.send()
    stage.wait_for(f"ends {message.message.job_id}")

    assert consumer.stop() == 0
    with server.client() as admin:
        assert admin.acl_log() == []


# --- passes -----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_passes_run_during_a_redis_outage_and_after_an_error_of_another(
    processes: Processes, run: Run, start_valkey: Callable[..., ValkeyServer]
) -> None:
    server = start_valkey()
    stage = Stage(processes, run.new_folder("stage"), server.url)
    consumer = stage.start("maintenance", "-w", "1")
    stage.wait_for("quick pass", count=2)

    server.freeze()
    before = len(stage.diary())
    poll(lambda: stage.diary()[before:].count("quick pass") >= 3, what="passes while Redis is frozen")
    server.thaw()
    server.kill()
    before = len(stage.diary())
    poll(lambda: stage.diary()[before:].count("quick pass") >= 3, what="passes while Redis is gone")

    assert stage.diary().count("broken pass") >= 3
    (failed,) = events(consumer, "pass.failed")
    assert (failed["pass"], failed["error"]) == ("broken", "ValueError")
    assert "canary-of-content" not in consumer.output
    assert consumer.stop() == 0
    assert stage.diary()[-1] == "drained"


def test_passes_leave_no_key_in_redis(stage: Stage, valkey: ValkeyServer) -> None:
    stage.start("maintenance")
    stage.wait_for("quick pass", count=2)

    with valkey.client() as admin:
        assert admin.keys("*") == []


def test_huey_member_with_a_time_prefix_is_refused(stage: Stage, valkey: ValkeyServer) -> None:
    consumer = stage.start_and_wait()
    with valkey.client() as admin:
        member = struct.pack(">Q", 1) + pickle.dumps(("run_job", 1))
        admin.zadd(queue_key(INTERACTIVE), {member: 0})

    poll(lambda: events(consumer, "message.refused"), what="the refusal is logged")
    assert consumer.is_running
