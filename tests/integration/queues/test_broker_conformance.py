"""Rules for every broker; the in-memory double obeys the same rules as Redis, so other tests may use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from aijobs.errors import BrokerUnavailable
from aijobs.ids import new_id
from aijobs.queues.broker import RedisBroker
from aijobs.queues.codec import BadMessage
from aijobs.queues.crew import Crew
from aijobs.queues.hueys import AiJobsHuey
from aijobs.queues.message import JobMessage
from aijobs.settings import KeyRing, Settings
from aijobs.testing.memory_broker import MemoryBroker
from tests.support.messages import KEYS, SECRET, outgoing
from tests.support.servers import ValkeyServer

INTERACTIVE, BACKGROUND = "ai-interactive", "ai-background"


@dataclass
class Case:
    """A broker and controls for the test."""

    broker: RedisBroker | MemoryBroker
    take: Callable[[str], JobMessage | None]
    break_down: Callable[[], None]
    lose_all: Callable[[], None]


def in_memory() -> Case:
    broker = MemoryBroker(KEYS)

    def break_down() -> None:
        broker.away = True

    return Case(broker, broker.take, break_down, broker.lose_all)


def in_redis(valkey: ValkeyServer) -> Case:
    settings = Settings(redis_url=valkey.url, message_keys=KEYS)

    def take(queue_name: str) -> JobMessage | None:
        popped: list[JobMessage] = []
        queue = AiJobsHuey(queue_name, lambda _: Crew(run_job=popped.append), load_settings=lambda: settings)
        queue.add_job_task()
        queue.gather_crew()
        queue.storage.read_timeout = 0.1
        task = queue.dequeue()
        if task is not None:
            queue.execute(task)
        return popped[0] if popped else None

    return Case(RedisBroker.from_settings(settings), take, valkey.stop, valkey.flush)


@pytest.fixture(params=["memory", "redis"])
def case(request: pytest.FixtureRequest) -> Case:
    if request.param == "memory":
        return in_memory()
    request.getfixturevalue("redis_url")
    return in_redis(request.getfixturevalue("valkey"))


def test_message_sent_twice_is_queued_once(case: Case) -> None:
    message = outgoing()

    assert case.broker.send([message]) == {}
    assert case.broker.send([message, message]) == {}

    assert case.broker.pending_count(INTERACTIVE) == 1
    assert case.take(INTERACTIVE) == message.message
    assert case.take(INTERACTIVE) is None


def test_messages_are_taken_by_priority_and_then_by_event(case: Case) -> None:
    first, second, third = (outgoing(priority=50) for _ in range(3))
    urgent, patient = outgoing(priority=0), outgoing(priority=100)

    case.broker.send([third, patient, first, urgent, second])

    taken = [case.take(INTERACTIVE) for _ in range(5)]
    assert taken == [one.message for one in (urgent, first, second, third, patient)]


def test_second_send_with_another_priority_does_not_move_the_message(case: Case) -> None:
    message, between = outgoing(priority=90), outgoing(priority=50)
    case.broker.send([message, between])

    case.broker.send([outgoing(event_id=message.event_id, job_id=message.message.job_id, priority=0)])

    assert case.broker.pending_count(INTERACTIVE) == 2
    assert case.take(INTERACTIVE) == between.message


def test_message_goes_to_its_own_queue_only(case: Case) -> None:
    message = outgoing(queue_name=BACKGROUND)

    case.broker.send([message])

    assert (case.broker.pending_count(INTERACTIVE), case.broker.pending_count(BACKGROUND)) == (0, 1)
    assert case.take(INTERACTIVE) is None
    assert case.take(BACKGROUND) == message.message


def test_unsendable_message_stops_no_other(case: Case) -> None:
    good, retired_key, future, stray = (
        outgoing(),
        outgoing(message_key_id="retired"),
        outgoing(message_version=99),
        outgoing(queue_name="ai-unheard-of"),
    )

    failures = case.broker.send([retired_key, future, stray, good])

    assert set(failures) == {retired_key.event_id, future.event_id, stray.event_id}
    assert all(isinstance(error, BadMessage) for error in failures.values())
    assert case.take(INTERACTIVE) == good.message


def test_lost_taken_and_unsendable_messages_are_missing(case: Case) -> None:
    queued, elsewhere, taken, never_sent = (
        outgoing(),
        outgoing(queue_name=BACKGROUND),
        outgoing(priority=0),
        outgoing(),
    )
    unsendable = outgoing(message_key_id="retired")
    case.broker.send([queued, elsewhere, taken])
    assert case.take(INTERACTIVE) == taken.message

    everything = [queued, elsewhere, taken, never_sent, unsendable]
    gone = {taken.event_id, never_sent.event_id, unsendable.event_id}
    assert case.broker.find_missing(everything) == gone
    assert case.broker.find_missing([]) == set()

    case.lose_all()
    assert case.broker.find_missing(everything) == {one.event_id for one in everything}


def test_missing_messages_are_found_in_a_long_backlog(case: Case) -> None:
    backlog = [outgoing() for _ in range(1201)]
    case.broker.send(backlog)
    strangers = [outgoing() for _ in range(3)]

    missing = case.broker.find_missing([*backlog[:600], *strangers, *backlog[600:]])

    assert missing == {one.event_id for one in strangers}


def test_message_signed_with_an_older_key_is_found_and_removed(case: Case) -> None:
    message = outgoing(message_key_id="k1")
    case.broker.send([message])
    case.broker._keys = KeyRing.parse(f"k2:{SECRET[::-1]}9,k1:{SECRET}", "test")

    case.broker.send([message])

    assert case.broker.pending_count(INTERACTIVE) == 1
    assert case.broker.find_missing([message]) == set()
    assert case.broker.remove(message) is True


def test_remove_deletes_only_its_message(case: Case) -> None:
    message, neighbour = outgoing(), outgoing()
    case.broker.send([message, neighbour])

    assert case.broker.remove(message) is True
    assert case.broker.remove(message) is False
    assert case.broker.remove(outgoing(message_key_id="retired")) is False

    assert case.take(INTERACTIVE) == neighbour.message


def test_find_cancel_hints_returns_only_hinted_jobs(case: Case) -> None:
    hinted, other = new_id(), new_id()
    case.broker.hint_cancel(hinted)

    assert case.broker.find_cancel_hints([other, hinted]) == {hinted}
    assert case.broker.find_cancel_hints([]) == set()


def test_broker_outage_raises_except_for_hints_and_removals(case: Case) -> None:
    message = outgoing()
    case.broker.ping()
    case.break_down()

    for ask in (
        lambda: case.broker.send([message]),
        lambda: case.broker.find_missing([message]),
        lambda: case.broker.pending_count(INTERACTIVE),
        case.broker.ping,
    ):
        with pytest.raises(BrokerUnavailable):
            ask()
    case.broker.hint_cancel(message.message.job_id)
    assert case.broker.find_cancel_hints([message.message.job_id]) == set()
    assert case.broker.remove(message) is False


def test_unsendable_message_is_reported_during_a_broker_outage(case: Case) -> None:
    case.break_down()

    assert set(case.broker.send([outgoing(message_key_id="retired")])) != set()
