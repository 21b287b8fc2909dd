"""Every failure of Redis raises `BrokerUnavailable`, never `BadMessage`, and the broker works again afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import redis

from aijobs.errors import BrokerUnavailable, SettingsError
from aijobs.queues.broker import CANCEL_TTL_S, RedisBroker, cancel_key, queue_key
from aijobs.queues.connection import ACL_RULES, connect
from aijobs.queues.consumer import check_broker
from aijobs.settings import Settings
from tests.support.forking import forked
from tests.support.lines import captured_lines
from tests.support.messages import KEYS, outgoing
from tests.support.ports import free_port
from tests.support.servers import ValkeyServer

INTERACTIVE = "ai-interactive"


def broker_at(url: str) -> RedisBroker:
    return RedisBroker.from_settings(Settings(redis_url=url, message_keys=KEYS))


def cause_of(act: Callable[[], object]) -> type[BaseException]:
    with pytest.raises(BrokerUnavailable) as trouble:
        act()
    assert trouble.value.__cause__ is not None
    return type(trouble.value.__cause__)


def test_closed_port_means_broker_unavailable() -> None:
    broker = broker_at(f"redis://127.0.0.1:{free_port()}/0")

    assert cause_of(lambda: broker.send([outgoing()])) is redis.ConnectionError


def test_send_to_a_frozen_broker_times_out_and_can_be_repeated(redis_url: str, valkey: ValkeyServer) -> None:
    broker, message = broker_at(redis_url), outgoing()
    broker.ping()
    valkey.freeze()

    assert cause_of(lambda: broker.send([message])) is redis.TimeoutError

    valkey.thaw()
    broker.send([message])
    assert broker.pending_count(INTERACTIVE) == 1


def test_frozen_broker_delays_cancel_hints_only_once(redis_url: str, valkey: ValkeyServer) -> None:
    broker = broker_at(redis_url)
    broker.hint_cancel("warm-up")
    valkey.freeze()

    with captured_lines() as lines:
        for _ in range(1000):  # If each one waited for a timeout, the test's time limit would be exceeded.
            assert broker.find_cancel_hints(["warm-up"]) == set()
        said = [line["event"] for line in lines()]

    assert said == ["broker.hints.away"]


def test_read_only_replica_is_unavailable_until_promoted(start_valkey: Callable[..., ValkeyServer]) -> None:
    server = start_valkey()
    broker, message = broker_at(server.url), outgoing()
    broker.ping()
    with server.client() as admin:
        admin.replicaof("127.0.0.1", str(free_port()))
        assert cause_of(lambda: broker.send([message])) is redis.ReadOnlyError
        admin.replicaof("NO", "ONE")

    assert broker.send([message]) == {}
    assert broker.find_missing([message]) == set()


def test_replica_without_stale_data_is_unavailable(start_valkey: Callable[..., ValkeyServer]) -> None:
    server = start_valkey("replica-serve-stale-data no")
    broker, message = broker_at(server.url), outgoing()
    with server.client() as admin:
        admin.replicaof("127.0.0.1", str(free_port()))
        cause = cause_of(lambda: broker.find_missing([message]))
        assert issubclass(cause, redis.RedisError)
        assert cause.__name__ == "MasterDownError"


def test_full_broker_is_unavailable_until_it_has_memory(start_valkey: Callable[..., ValkeyServer]) -> None:
    server = start_valkey("maxmemory-policy noeviction")
    broker, message = broker_at(server.url), outgoing()
    with server.client() as admin:
        admin.config_set("maxmemory", "1")
        assert cause_of(lambda: broker.send([message])) is redis.OutOfMemoryError
        assert broker.find_missing([message]) == {message.event_id}
        admin.config_set("maxmemory", "0")

    assert broker.send([message]) == {}


def test_loading_broker_is_unavailable() -> None:
    from redis._parsers.base import BaseParser

    from aijobs.queues.connection import unavailable

    error = BaseParser.parse_error("LOADING Valkey is loading the dataset in memory")

    assert isinstance(error, redis.BusyLoadingError)
    assert isinstance(unavailable(connect("redis://127.0.0.1:1/0"), error), BrokerUnavailable)


def test_wrong_password_and_missing_permission_mean_broker_unavailable(
    start_valkey: Callable[..., ValkeyServer],
) -> None:
    server = start_valkey("user reader on >secret ~* +ping +zmscore +zcard")

    assert cause_of(broker_at(server.url_for("reader", "wrong")).ping) is redis.AuthenticationError
    reader = broker_at(server.url_for("reader", "secret"))
    reader.ping()
    assert cause_of(lambda: reader.send([outgoing()])) is redis.exceptions.NoPermissionError


def test_key_of_the_wrong_type_means_broker_unavailable(redis_url: str, valkey: ValkeyServer) -> None:
    broker = broker_at(redis_url)
    with valkey.client() as admin:
        admin.set(queue_key(INTERACTIVE), "somebody else's")

    assert issubclass(cause_of(lambda: broker.send([outgoing()])), redis.ResponseError)


def test_full_connection_limit_means_broker_unavailable(start_valkey: Callable[..., ValkeyServer]) -> None:
    server = start_valkey("maxclients 1")
    # The answer may be lost with the closed socket; both errors are connection errors.
    with server.client() as only:
        only.ping()
        assert issubclass(cause_of(lambda: broker_at(server.url).send([outgoing()])), redis.ConnectionError)


def test_restarted_broker_is_used_at_the_next_call(redis_url: str, valkey: ValkeyServer) -> None:
    broker, message = broker_at(redis_url), outgoing()
    broker.send([message])

    valkey.restart()

    assert broker.find_missing([message]) == {message.event_id}
    assert broker.send([message]) == {}
    assert broker.pending_count(INTERACTIVE) == 1


def test_forked_process_shares_no_connection_with_its_parent(redis_url: str) -> None:
    broker, message = broker_at(redis_url), outgoing()
    broker.ping()

    def act() -> None:
        broker.send([message])
        assert broker.pending_count(INTERACTIVE) == 1

    with forked(act):
        for _ in range(50):
            broker.ping()

    assert broker.find_missing([message]) == set()


def test_message_sent_by_twenty_threads_is_queued_once(redis_url: str) -> None:
    broker, message = broker_at(redis_url), outgoing()
    barrier, failures = threading.Barrier(20), []

    def send() -> None:
        barrier.wait()
        try:
            broker.send([message])
        except BrokerUnavailable as error:
            failures.append(error)

    threads = [threading.Thread(target=send) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert broker.pending_count(INTERACTIVE) == 1


def test_cancel_hint_expires_after_five_minutes(redis_url: str, valkey: ValkeyServer) -> None:
    broker_at(redis_url).hint_cancel("some-job")

    with valkey.client() as admin:
        assert CANCEL_TTL_S - 5 <= admin.ttl(cancel_key("some-job")) <= CANCEL_TTL_S


def test_broker_works_under_the_documented_acl_rules(
    start_valkey: Callable[..., ValkeyServer],
) -> None:
    server = start_valkey(f"user aijobs on >secret {ACL_RULES}")
    broker, message = broker_at(server.url_for("aijobs", "secret")), outgoing()

    broker.ping()
    broker.send([message])
    assert broker.find_missing([message]) == set()
    assert broker.pending_count(INTERACTIVE) == 1
    assert broker.remove(message)
    broker.hint_cancel("job")
    assert broker.find_cancel_hints(["job"]) == {"job"}
    with server.client() as admin:
        assert admin.acl_log() == []
    for refused in (("GET", "other"), ("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "GET", "*"), ("EVAL", "return 1", "0")):
        with pytest.raises(redis.exceptions.NoPermissionError):
            broker.client.execute_command(*refused)


@pytest.mark.parametrize("url", ["", "127.0.0.1:6379", "http://127.0.0.1", "redis://127.0.0.1:port/0"])
def test_unreadable_address_is_a_settings_error(url: str) -> None:
    with pytest.raises(SettingsError, match="AIJOBS_REDIS_URL"):
        connect(url)


@pytest.mark.parametrize(
    ("policy", "warned"), [("allkeys-lru", ["allkeys-lru"]), ("noeviction", []), ("volatile-ttl", [])]
)
def test_eviction_policy_that_may_drop_queues_is_logged_once(
    start_valkey: Callable[..., ValkeyServer], policy: str, warned: list[str]
) -> None:
    server = start_valkey(f"maxmemory-policy {policy}")
    with captured_lines() as lines:
        check_broker(Settings(redis_url=server.url, message_keys=KEYS))
        assert [line["policy"] for line in lines() if line["event"] == "broker.may_evict"] == warned


def test_unreadable_eviction_policy_does_not_stop_the_start(
    start_valkey: Callable[..., ValkeyServer],
) -> None:
    server = start_valkey(f"user aijobs on >secret {ACL_RULES.replace('+info ', '')}")
    with captured_lines() as lines:
        check_broker(Settings(redis_url=server.url.replace("redis://", "redis://aijobs:secret@"), message_keys=KEYS))
        assert not lines()
