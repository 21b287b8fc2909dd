"""Heartbeats: live workers, their active jobs, and workers that are gone."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable

import pytest

from aijobs.errors import BrokerUnavailable
from aijobs.ids import InstanceId, new_id
from aijobs.queues.connection import ACL_RULES, ImpatientClient, connect
from aijobs.queues.presence import GATHER_S, HEARTBEAT_PREFIX, TTL_S, Presence, PresenceReader, WorkerPresence
from tests.support.polling import poll
from tests.support.servers import ValkeyServer


def reader_at(redis_url: str) -> PresenceReader:
    """Return a reader that retries at once after an error."""
    return PresenceReader(ImpatientClient(connect(redis_url), pause_s=0))


def present(reader: PresenceReader) -> WorkerPresence:
    found = reader.read()
    assert len(found) == 1
    return found[0]


def test_active_jobs_are_written_at_each_start_and_end(redis_url: str) -> None:
    instance = InstanceId.current()
    presence, reader = Presence(connect(redis_url), instance, "ai-interactive"), reader_at(redis_url)
    presence.start()
    first, second = new_id(), new_id()

    presence.started(first)
    presence.started(second)
    poll(lambda: present(reader).active_job_ids == (first, second) if reader.read() else False)
    presence.finished(first)
    poll(lambda: present(reader).active_job_ids == (second,))

    found = present(reader)
    assert (found.instance_id, found.queue, found.active_job_count) == (str(instance), "ai-interactive", 1)
    assert (found.host, found.pid) == (instance.host, instance.pid)
    assert 0 <= found.age_s < 5
    presence.leave()
    assert reader.read() == []


def test_writes_for_quick_jobs_are_batched(redis_url: str) -> None:
    client, reader, last = connect(redis_url), reader_at(redis_url), new_id()
    writes: list[float] = []
    write = client.set
    client.set = lambda *args, **kwargs: writes.append(time.monotonic()) or write(*args, **kwargs)  # type: ignore[method-assign,func-returns-value,return-value]
    presence = Presence(client, InstanceId.current(), "ai-interactive")
    presence.start()
    for job_id in [*(new_id() for _ in range(200)), last]:
        presence.started(job_id)
        presence.finished(job_id)
    presence.started(last)
    poll(lambda: reader.read() and present(reader).active_job_ids == (last,), what="the last state is written")
    presence.leave()
    assert all(later - earlier >= GATHER_S for earlier, later in itertools.pairwise(writes)), writes


def test_heartbeat_has_the_documented_fields_and_expires(redis_url: str, valkey: ValkeyServer) -> None:
    instance = InstanceId.current()
    Presence(connect(redis_url), instance, "ai-background").beat()

    with valkey.client() as admin:
        card = json.loads(admin.get(f"{HEARTBEAT_PREFIX}{instance}"))
        assert TTL_S - 5 <= admin.ttl(f"{HEARTBEAT_PREFIX}{instance}") <= TTL_S
    assert set(card) == {
        "instanceId",
        "queue",
        "host",
        "pid",
        "startedAt",
        "slots",
        "activeJobCount",
        "activeJobIds",
        "lastAskedMs",
        "lastPopMs",
    }


def test_live_worker_is_listed_again_after_redis_lost_its_data(redis_url: str, valkey: ValkeyServer) -> None:
    presence = Presence(connect(redis_url), InstanceId.current(), "ai-interactive", beat_s=0.1)
    reader = reader_at(redis_url)
    presence.start()
    poll(reader.read)

    valkey.flush()

    poll(reader.read, what="the worker is listed again")
    presence.leave()


def test_frozen_redis_does_not_delay_jobs(redis_url: str, valkey: ValkeyServer) -> None:
    presence = Presence(connect(redis_url), InstanceId.current(), "ai-interactive", beat_s=0.1)
    reader = reader_at(redis_url)
    presence.start()
    poll(reader.read)
    valkey.freeze()

    ids = [new_id() for _ in range(500)]
    for job_id in ids:  # If each one waited 1.5 s for a write, the test's time limit would be exceeded.
        presence.started(job_id)
        presence.finished(job_id)
    presence.started("at-work")
    with pytest.raises(BrokerUnavailable):
        reader.read()

    valkey.thaw()
    poll(lambda: present(reader).active_job_ids == ("at-work",) if reader.read() else False)
    presence.leave()


def test_age_of_a_heartbeat_is_measured_by_redis(redis_url: str, valkey: ValkeyServer) -> None:
    instance = InstanceId.current()
    Presence(connect(redis_url), instance, "ai-interactive").beat()

    with valkey.client() as admin:
        admin.expire(f"{HEARTBEAT_PREFIX}{instance}", 20)

    assert 69 <= present(reader_at(redis_url)).age_s <= 71


def test_invalid_heartbeats_are_skipped(redis_url: str, valkey: ValkeyServer) -> None:
    with valkey.client() as admin:
        admin.set(f"{HEARTBEAT_PREFIX}a", "junk", ex=50)
        admin.set(f"{HEARTBEAT_PREFIX}b", "[]", ex=50)
        admin.set(f"{HEARTBEAT_PREFIX}c", b"\xff", ex=50)
        admin.set(f"{HEARTBEAT_PREFIX}for-ever", "{}")

    assert reader_at(redis_url).read() == []


def test_presence_works_under_the_documented_acl_rules(start_valkey: Callable[..., ValkeyServer]) -> None:
    server = start_valkey(f"user aijobs on >secret {ACL_RULES}")
    client = connect(server.url_for("aijobs", "secret"))
    presence = Presence(client, InstanceId.current(), "ai-interactive")
    reader = PresenceReader(ImpatientClient(client))

    presence.beat()
    assert len(reader.read()) == 1
    presence.leave()

    assert reader.read() == []
    with server.client() as admin:
        assert admin.acl_log() == []
