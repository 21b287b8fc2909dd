"""The state of a broker that can't be used, and its cause in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from aijobs.errors import BrokerUnavailable, SettingsError
from aijobs.queues.broker import RedisBroker, queue_key
from aijobs.queues.connection import ACL_RULES, PAUSE_S, connect
from aijobs.queues.consumer import check_broker
from aijobs.queues.state import AWAY, OK, TAKES_NO_WRITES, UNSUPPORTED
from aijobs.settings import Settings
from tests.support.lines import captured_lines
from tests.support.messages import KEYS, outgoing
from tests.support.polling import poll
from tests.support.ports import free_port
from tests.support.processes import Processes, Run
from tests.support.servers import ValkeyServer, valkey_binary
from tests.support.tls import make_certificate, tls_port

INTERACTIVE, BACKGROUND = "ai-interactive", "ai-background"
StartValkey = Callable[..., ValkeyServer]


def broker_at(url: str) -> RedisBroker:
    return RedisBroker.at(url, KEYS)


def cause_at(url: str) -> str:
    """Return the cause in a broker's error, which must equal the cause in its state."""
    with pytest.raises(BrokerUnavailable) as trouble:
        broker_at(url).ping()
    state = broker_at(url).probe()
    assert (state.state, state.cause) == (AWAY, str(trouble.value))
    return str(trouble.value)


# --- writes --------------------------------------------------------------------------------------------------------


def test_state_of_a_working_broker_is_ok_and_reading_it_leaves_no_key(redis_url: str, valkey: ValkeyServer) -> None:
    broker = broker_at(redis_url)
    broker.probe()
    with valkey.client() as admin:
        assert admin.keys() == []
    broker.send([outgoing(), outgoing()])
    state = broker.probe()
    assert (state.state, state.cause) == (OK, None)
    assert [state.of(name).depth for name in (INTERACTIVE, BACKGROUND)] == [2, 0]


def test_full_broker_takes_no_writes(start_valkey: StartValkey) -> None:
    server = start_valkey("maxmemory-policy noeviction")
    broker = broker_at(server.url)
    broker.send([outgoing()])
    with server.client() as admin:
        admin.config_set("maxmemory", "1")
        state = broker.probe()
        assert (state.state, state.cause) == (TAKES_NO_WRITES, "Its memory is full (maxmemory)")
        assert state.of(INTERACTIVE).depth == 1, "its depth can still be read"
        admin.config_set("maxmemory", "0")
    assert broker.probe().state == OK


def test_read_only_replica_takes_no_writes_until_promoted(start_valkey: StartValkey) -> None:
    server = start_valkey()
    broker = broker_at(server.url)
    with server.client() as admin:
        admin.replicaof("127.0.0.1", str(free_port()))
        state = broker.probe()
        assert (state.state, state.cause) == (TAKES_NO_WRITES, "It is a read-only replica")
        admin.replicaof("NO", "ONE")
    assert broker.probe().state == OK
    assert broker.send([outgoing()]) == {}


def test_broker_that_cannot_save_or_replicate_takes_no_writes(start_valkey: StartValkey) -> None:
    server = start_valkey("min-replicas-to-write 1")
    state = broker_at(server.url).probe()
    assert (state.state, state.cause) == (TAKES_NO_WRITES, "Too few replicas are connected to it (NOREPLICAS)")

    server = start_valkey("save 3600 1", "rdb-key-save-delay 0", "dbfilename folder.rdb")
    with server.client() as admin:
        folder = Path(admin.config_get("dir")["dir"])
        (folder / "folder.rdb").mkdir()
        admin.set("some", "key")
        admin.bgsave()
        poll(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err", what="the save has failed")
    state = broker_at(server.url).probe()
    assert (state.state, state.cause) == (TAKES_NO_WRITES, "It can't save its data to disk (MISCONF)")
    with server.client() as admin:
        admin.config_set("save", "")  # Otherwise its shutdown waits for a save.


@pytest.mark.parametrize(("missing", "named"), [("+zadd ", "zadd"), ("+set ", "set")])
def test_missing_permission_is_named_with_its_command(start_valkey: StartValkey, missing: str, named: str) -> None:
    server = start_valkey(f"user aijobs on >secret {ACL_RULES.replace(missing, '')}")
    state = broker_at(server.url_for("aijobs", "secret")).probe()
    assert state.state == TAKES_NO_WRITES
    assert state.cause == f"Its user has no right to one of our commands or keys (NOPERM): {named}"
    assert state.of(INTERACTIVE).state == TAKES_NO_WRITES


def test_state_can_be_read_under_the_documented_acl_rules(start_valkey: StartValkey) -> None:
    server = start_valkey(f"user aijobs on >secret {ACL_RULES}")
    assert broker_at(server.url_for("aijobs", "secret")).probe().state == OK
    with server.client() as admin:
        assert admin.acl_log() == []


def test_key_of_another_type_affects_only_its_queue(redis_url: str, valkey: ValkeyServer) -> None:
    with valkey.client() as admin:
        admin.set(queue_key(INTERACTIVE), "somebody else's")
    state = broker_at(redis_url).probe()
    assert state.state == TAKES_NO_WRITES
    assert state.cause == f"{INTERACTIVE}: One of our keys holds a value of another type (WRONGTYPE)"
    assert (state.of(INTERACTIVE).state, state.of(BACKGROUND).state) == (TAKES_NO_WRITES, OK)


def test_frozen_broker_delays_reading_its_state_only_once(redis_url: str, valkey: ValkeyServer) -> None:
    broker = broker_at(redis_url)
    assert broker.probe().state == OK
    valkey.freeze()
    states = [broker.probe() for _ in range(200)]  # If each one waited, the test's time limit would be exceeded.
    valkey.thaw()
    assert {(state.state, state.cause) for state in states} == {(AWAY, "It doesn't answer in time")}
    poll(lambda: broker.probe().state == OK, timeout=PAUSE_S + 5, what="it is asked again")


# --- clusters and sentinels ----------------------------------------------------------------------------------------


@pytest.fixture(params=["cluster", "sentinel"])
def unsupported_url(
    request: pytest.FixtureRequest, start_valkey: StartValkey, processes: Processes, run: Run
) -> Iterator[str]:
    if request.param == "cluster":
        yield start_valkey("cluster-enabled yes").url
        return
    port, folder = free_port(), run.new_folder("sentinel")
    (folder / "sentinel.conf").write_text(f"port {port}\nbind 127.0.0.1\ndir {folder}\n")
    processes.spawn([str(valkey_binary()), str(folder / "sentinel.conf"), "--sentinel"], name="sentinel")
    url = f"redis://127.0.0.1:{port}/0"

    def answers() -> bool:
        try:
            return bool(connect(url).ping())
        except redis.RedisError:
            return False

    poll(answers, what="the sentinel answers")
    yield url


def test_cluster_and_sentinel_are_refused_in_one_line(unsupported_url: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        check_broker(Settings(redis_url=unsupported_url, message_keys=KEYS))
    state = broker_at(unsupported_url).probe()
    assert state.state == UNSUPPORTED
    assert state.cause is not None
    assert str(refusal.value) == f"AIJOBS_REDIS_URL can't be used. {state.cause}"
    assert state.cause.startswith(("It is a Redis cluster", "It is a Sentinel"))


def test_broker_that_becomes_a_cluster_later_is_unsupported(start_valkey: StartValkey) -> None:
    server = start_valkey("cluster-enabled yes")
    with pytest.raises(BrokerUnavailable, match="Redis cluster") as trouble:
        broker_at(server.url).send([outgoing()])
    assert trouble.value.state == UNSUPPORTED


# --- causes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(run: Run) -> tuple[Path, Path]:
    return make_certificate(run.new_folder("tls"))


def test_broker_behind_tls_works_with_its_ca(
    redis_url: str, valkey: ValkeyServer, certificate: tuple[Path, Path]
) -> None:
    with tls_port(valkey.port, *certificate) as port:
        broker = broker_at(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate[0]}")
        assert broker.send([outgoing()]) == {}
        assert broker.probe().of(INTERACTIVE).depth == 1


def test_refused_certificate_is_named_as_the_cause(valkey: ValkeyServer, certificate: tuple[Path, Path]) -> None:
    with tls_port(valkey.port, *certificate) as port:
        assert cause_at(f"rediss://127.0.0.1:{port}/0").startswith("Its certificate is refused: self")


def test_plain_connection_to_a_tls_port_is_named_as_the_cause(
    valkey: ValkeyServer, certificate: tuple[Path, Path]
) -> None:
    with tls_port(valkey.port, *certificate) as port:
        assert "rediss://" in cause_at(f"redis://127.0.0.1:{port}/0")


def test_tls_to_a_plain_port_is_named_as_the_cause(redis_url: str, valkey: ValkeyServer) -> None:
    assert "redis://" in cause_at(f"rediss://127.0.0.1:{valkey.port}/0")


def test_wrong_password_or_user_is_the_cause_but_not_quoted(start_valkey: StartValkey) -> None:
    server = start_valkey("requirepass sesame")
    refused = "It refuses the password, or doesn't know the user"
    assert cause_at(server.url_for("default", "canary-secret")) == refused
    assert cause_at(server.url_for("nobody", "canary-secret")) == refused
    assert cause_at(server.url) == "It asks for a password, and the address has none"
    assert cause_at(f"redis://:sesame@127.0.0.1:{server.port}/99") == (
        "It has no database of the number in the address"
    )


def test_needless_password_is_named_as_the_cause(redis_url: str, valkey: ValkeyServer) -> None:
    assert cause_at(f"redis://:canary-secret@127.0.0.1:{valkey.port}/0") == (
        "It has no password, and the address has one"
    )


def test_missing_host_port_or_socket_is_named_as_the_cause(tmp_path: Path) -> None:
    assert cause_at("redis://aijobs.invalid:6379/0") == "There is no such host"
    assert (
        cause_at(f"redis://127.0.0.1:{free_port()}/0") == "The connection is refused: no server listens at this address"
    )
    assert cause_at(f"unix://{tmp_path}/none.sock") == "A file that the address names isn't there"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("rediss://127.0.0.1/0?ssl_ca_certs=/nowhere/ca.pem", "ssl_ca_certs names /nowhere/ca.pem, which isn't there"),
        ("redis://127.0.0.1/0?ssl_ca_certs=/nowhere/ca.pem", "ssl_ca_certs needs rediss://"),
        ("redis://:canary-secret@127.0.0.1/0?tiemout=3", "tiemout is no option"),
        ("rediss://127.0.0.1/0?ssl_cert_reqs=sometimes", "has no value that fits"),
        ("redis+sentinel://:canary-secret@a:1,b:2/primary", "Sentinel isn't supported"),
        ("redis+cluster://:canary-secret@a:1", "a Redis cluster isn't supported"),
        ("redis://:canary-secret@a:1,b:2/0", "it names several servers"),
    ],
)
def test_unusable_address_is_refused_in_one_line(url: str, message: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        connect(url)
    assert message in str(refusal.value)
    assert "canary-secret" not in str(refusal.value)


def test_outage_is_logged_with_its_cause(start_valkey: StartValkey) -> None:
    server = start_valkey("requirepass sesame")
    with captured_lines() as lines:
        broker_at(server.url_for("default", "canary-secret")).hint_cancel("job")
        (line,) = lines()
    assert (line["event"], line["cause"]) == ("broker.hints.away", "It refuses the password, or doesn't know the user")
