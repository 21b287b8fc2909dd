"""Rotation of stored credentials to a new key of the ring: batched, resumable, safe during other work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import event, update

from aijobs.ai.calling.router import ModelRouter
from aijobs.ai.provider import CancellationToken, GenerateRequest, Route
from aijobs.credentials.models import UserModelCredential
from aijobs.credentials.rotation import CredentialRotation, Rotated
from aijobs.credentials.store import CredentialStore
from aijobs.credentials.vault import CredentialVault, Place, Sealed
from aijobs.definitions.definition import USER_DEEPSEEK_KEY
from aijobs.errors import SettingsError
from aijobs.jobs.requests import CreateJobInput, Overrides
from aijobs.settings import KeyRing
from tests.integration.engine.stage import CARDS, NOTES, Stage, open_stage
from tests.support.jobs import Kit, open_kit, race

C1, C2 = ("c1", b"c" * 32), ("c2", b"d" * 32)
BOTH = KeyRing((C2, C1))
ROUTER = ModelRouter({"d": (Route("local", "m"),)}, "d", {USER_DEEPSEEK_KEY: (Route("local", "m"),)})


def fill(kit: Kit, count: int) -> dict[str, str]:
    """Store `count` keys of several users under the ring's first key; return the keys by their ids."""
    made = {}
    for n in range(count):
        key = f"sk-of-number-{n:04}"
        made[kit.services.credentials.create(f"u{n % 3}", key).id] = key
    return made


def rotation(kit: Kit, *, batch: int = 2, ring: KeyRing = BOTH) -> CredentialRotation:
    """Return a rotation as in another process, with the new key first."""
    vault = CredentialVault(ring, kit.services.settings.secret_key)
    return CredentialRotation(kit.database, CredentialStore(kit.clock, vault), batch)


def stored(kit: Kit) -> dict[str, tuple[str, bytes]]:
    return {row["id"]: (row["key_id"], row["ciphertext"]) for row in kit.rows("user_model_credentials")}


def opened(kit: Kit, *ring: tuple[str, bytes]) -> dict[str, str]:
    """Decrypt every stored key with this ring."""
    vault = CredentialVault(KeyRing(ring), "s" * 32)
    return {
        row["id"]: vault.open(Sealed(row["key_id"], row["ciphertext"]), Place(row["id"], row["user_id"], row["mode"]))
        for row in kit.rows("user_model_credentials")
    }


def test_rotation_encrypts_all_keys_with_the_new_key(kit: Kit) -> None:
    keys = fill(kit, 5)
    before = stored(kit)
    others = [{**row, "key_id": "", "ciphertext": b""} for row in kit.rows("user_model_credentials")]
    assert rotation(kit).run() == Rotated("c2", 5, (), 0)
    assert {key_id for key_id, _ in stored(kit).values()} == {"c2"}
    assert not {c for _, c in stored(kit).values()} & {c for _, c in before.values()}
    assert opened(kit, C2) == keys
    assert [{**row, "key_id": "", "ciphertext": b""} for row in kit.rows("user_model_credentials")] == others


def test_second_rotation_writes_nothing(kit: Kit) -> None:
    fill(kit, 3)
    rotation(kit).run()
    before = kit.everything()
    with kit.statements() as seen:
        assert rotation(kit).run() == Rotated("c2", 0, (), 0)
    assert not [statement for statement in seen if statement.startswith("UPDATE")]
    assert kit.everything() == before


def test_rotation_killed_between_batches_continues_in_the_next_run(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = fill(kit, 5)
    killed = rotation(kit)
    whole, batches = killed._write, [0]

    def write(fresh: Any) -> int:
        batches[0] += 1
        if batches[0] == 2:
            raise KeyboardInterrupt
        return whole(fresh)

    monkeypatch.setattr(killed, "_write", write)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    assert sorted(key_id for key_id, _ in stored(kit).values()) == ["c1", "c1", "c1", "c2", "c2"]
    assert opened(kit, C2, C1) == keys, "between two runs every key is readable"
    assert rotation(kit).run() == Rotated("c2", 3, (), 0)
    assert opened(kit, C2) == keys


def test_failed_batch_is_rolled_back(kit: Kit) -> None:
    keys = fill(kit, 4)
    before, updates = stored(kit), [0]

    def fail(_conn: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if statement.startswith("UPDATE"):
            updates[0] += 1
            if updates[0] == 2:
                raise RuntimeError("the process dies here")

    event.listen(kit.database.engine, "before_cursor_execute", fail)
    try:
        with pytest.raises(RuntimeError):
            rotation(kit, batch=4).run()
    finally:
        event.remove(kit.database.engine, "before_cursor_execute", fail)
    assert updates == [2]
    assert stored(kit) == before
    assert rotation(kit, batch=4).run().rotated == 4
    assert opened(kit, C2) == keys


def test_unreadable_keys_are_reported_and_stop_no_other(kit: Kit) -> None:
    keys = fill(kit, 7)
    first, second, third, *_ = ids = sorted(keys)
    rows = stored(kit)
    changes: dict[str, dict[str, Any]] = {
        first: {"ciphertext": b"\x01garbled"},
        second: {"key_id": "lost"},
        third: {"ciphertext": rows[ids[3]][1]},
        ids[-1]: {"user_id": "thief"},
    }
    with kit.database.transaction() as session:
        for credential_id, values in changes.items():
            session.execute(update(UserModelCredential).where(UserModelCredential.id == credential_id).values(**values))
    before = stored(kit)
    for moved in (3, 0):
        done = rotation(kit).run()
        assert (done.rotated, sorted(done.unreadable), done.remaining) == (moved, sorted(changes), 4)
        assert not done.is_complete
    for credential_id in changes:
        assert stored(kit)[credential_id] == before[credential_id]


@pytest.fixture
def meddling(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> Callable[[CredentialRotation, Callable[[], None]], Rotated]:
    """Return a function that runs a rotation, and something else once between its read and its write."""

    def run(rotation: CredentialRotation, meddle: Callable[[], None]) -> Rotated:
        whole, todo = rotation._write, [meddle]

        def write(fresh: Any) -> int:
            while todo:
                todo.pop()()
            return whole(fresh)

        monkeypatch.setattr(rotation, "_write", write)
        return rotation.run()

    return run


def test_key_deleted_during_a_rotation_stays_deleted(kit: Kit, meddling: Any) -> None:
    keys = fill(kit, 3)
    gone = min(keys)
    done = meddling(rotation(kit), lambda: kit.services.credentials.delete("u0", gone))
    assert done == Rotated("c2", 2, (), 0)
    assert opened(kit, C2) == {key: value for key, value in keys.items() if key != gone}


def test_slower_of_two_rotations_writes_nothing(kit: Kit, meddling: Any) -> None:
    keys = fill(kit, 4)
    outcome: list[Rotated] = []
    won: list[Any] = []

    def other() -> None:
        outcome.append(rotation(kit).run())
        won.append(stored(kit))

    assert meddling(rotation(kit), other).rotated == 0
    assert outcome == [Rotated("c2", 4, (), 0)]
    assert [stored(kit)] == won
    assert opened(kit, C2) == keys


def test_concurrent_rotations_move_each_key_once(live_kit: Kit) -> None:
    keys = fill(live_kit, 9)
    outcomes = race(*[rotation(live_kit).run] * 3)
    assert all(isinstance(one, Rotated) for one in outcomes), outcomes
    assert sum(one.rotated for one in outcomes) == 9
    assert all(one.is_complete and not one.unreadable for one in outcomes)
    assert opened(live_kit, C2) == keys


def test_repeated_write_of_a_batch_counts_its_own_rows(sqlite_kit: Kit) -> None:
    kit = sqlite_kit
    fill(kit, 1)
    one = rotation(kit)
    (row,) = one._next("")
    fresh = one._again(row)
    assert one._write([(row, fresh)]) == 1
    assert one._write([(row, fresh)]) == 1, "the same write finds its own result"
    assert one._write([(row, one._again(row))]) == 0, "a row that has changed is not written"


def test_key_stored_with_the_old_key_during_a_rotation_is_moved_by_the_next(kit: Kit, meddling: Any) -> None:
    """The process that stores the key still uses the old key of the ring, so that must not be removed yet."""
    fill(kit, 2)
    late: list[str] = []

    def store_late() -> None:
        late.append(kit.services.credentials.create("u9", "sk-late-0000").id)

    assert meddling(rotation(kit, batch=10), store_late).rotated in (2, 3)
    done = rotation(kit).run()
    assert done.is_complete
    assert stored(kit)[late[0]][0] == "c2"


# --- the whole rotation with jobs --------------------------------------------------------------------------------


class Paid:
    """A provider that records the key of each call."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def __call__(self, request: GenerateRequest, token: CancellationToken) -> str:
        assert request.credential is not None
        self.keys.append(request.credential.open())
        return json.dumps(CARDS)


def paid_job(stage: Stage, job_type: str, credential_id: str, user_id: str) -> str:
    overrides = Overrides(credential_mode=USER_DEEPSEEK_KEY, credential_id=credential_id)
    request = CreateJobInput(user_id, job_type, "note", "note-1", NOTES, overrides=overrides)
    return stage.kit.jobs.create_job(request).job.id


def processes(kit: Kit, ring: KeyRing) -> Iterator[tuple[Stage, Paid, str]]:
    """Yield a worker process with this ring, and its job type."""
    with open_kit(kit.url, clock=kit.clock, credential_keys=ring) as each:
        each.services.check_start()
        with open_stage(each, router=ROUTER) as stage:
            paid = Paid()
            yield stage, paid, stage.asking(paid)


def test_jobs_run_before_during_and_after_a_rotation(kit: Kit) -> None:
    with_old, with_both, with_new = (KeyRing(ring) for ring in ((C1,), (C2, C1), (C2,)))
    keys = fill(kit, 3)
    ids = sorted(keys)
    garbled = kit.services.credentials.create("u0", "sk-garbled-0000").id
    waiting: list[str] = []
    for stage, paid, job_type in processes(kit, with_old):
        assert stage.run_to_end(paid_job(stage, job_type, ids[0], "u0")).lifecycle_status == "succeeded"
        assert paid.keys == [keys[ids[0]]]
        waiting.append(paid_job(stage, job_type, ids[1], "u1"))
    for stage, paid, job_type in processes(kit, with_both):
        running = paid_job(stage, job_type, ids[2], "u2")
        rotated: list[Rotated] = []

        def rotate_meanwhile(
            request: GenerateRequest, token: CancellationToken, paid: Paid = paid, done: Any = rotated
        ) -> str:
            done.append(rotation(kit).run())
            return paid(request, token)

        stage.provider.answers[:] = [rotate_meanwhile]
        assert stage.run_to_end(running).lifecycle_status == "succeeded", "the key was read before the rotation"
        assert rotated == [Rotated("c2", 4, (), 0)]
        assert paid.keys == [keys[ids[2]]]
        stage.provider.answers[:] = [paid]
        assert stage.run_to_end(waiting[0]).lifecycle_status == "succeeded"
        assert rotation(kit).run() == Rotated("c2", 0, (), 0)
    with kit.database.transaction() as session:
        session.execute(
            update(UserModelCredential).where(UserModelCredential.id == garbled).values(ciphertext=b"\x01nonsense")
        )
    for stage, paid, job_type in processes(kit, with_new):
        spoilt = paid_job(stage, job_type, garbled, "u0")
        assert stage.run_to_end(spoilt).error_code == "CREDENTIAL_UNREADABLE"
        for n, credential_id in enumerate(ids):
            assert stage.run_to_end(paid_job(stage, job_type, credential_id, f"u{n}")).lifecycle_status == "succeeded"
        assert paid.keys == [keys[credential_id] for credential_id in ids]
    with pytest.raises(SettingsError, match=r"'c2' \(4\)"):
        next(processes(kit, with_old))
