"""Sessions of operators on each database: they expire, and an ended session stays ended."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs

from aijobs.operators import accounts as operators
from aijobs.operators.audit import Actor, AuditTrail
from aijobs.operators.models import AuditLog, Operator, OperatorSession
from aijobs.operators.sessions import Ended, OperatorSessions, SessionRules, list_sessions, revoke_sessions
from aijobs.settings import Settings
from aijobs.upkeep.retention import Retention
from tests.support.jobs import BEGIN, Kit, race

HOUR = 3600
DAY = 24 * HOUR


class Staff:
    """Operators of a database and their sessions."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.rules = SessionRules(Settings(), kit.clock)
        self.sessions = OperatorSessions(kit.database, self.rules)
        self.trail = AuditTrail(kit.database, kit.clock, Actor("cli:tests"))

    def hire(self, username: str) -> Operator:
        with self.kit.database.transaction() as session:
            session.add(Operator(username=username, password_hash="old", role="OPERATOR", created_at=BEGIN))
        return self.get(username)

    def get(self, username: str) -> Operator:
        with self.kit.database.read() as session:
            return operators.get_operator(session, username)

    def begin(self, operator: Operator, agent: str | None = "Firefox") -> str:
        key = self.sessions.begin(operator, "192.0.2.7", agent)
        assert key is not None
        return key

    def ended(self, key: str) -> Ended | None:
        found = self.sessions.find(key)
        assert found is not None
        return found.ended

    def listed(self) -> list[str | None]:
        with self.kit.database.read() as session:
            return [row.user_agent for row in list_sessions(session, self.rules, self.rules.is_good())]

    def write(self, work: Any, *arguments: Any) -> Any:
        return self.kit.database.write(lambda session: work(session, self.trail, *arguments))

    def audit(self) -> list[tuple[str, str]]:
        with self.kit.database.read() as session:
            query = select(AuditLog.action, AuditLog.target_id).order_by(AuditLog.at, AuditLog.id)
            return [(action, target) for action, target in session.execute(query)]


@pytest.fixture
def staff(kit: Kit) -> Staff:
    return Staff(kit)


def test_session_ends_12_hours_after_its_last_use(staff: Staff) -> None:
    key = staff.begin(staff.hire("ann"))
    for _ in range(3):
        staff.kit.advance(12 * HOUR - 1)
        found = staff.sessions.find(key)
        assert found is not None
        assert (found.operator.username, found.ended, found.stale) == ("ann", None, True)
        staff.sessions.note_seen(found.id)
    staff.kit.advance(12 * HOUR - 1)
    assert staff.ended(key) is None
    staff.kit.advance(1)
    assert staff.ended(key) is Ended.IDLE
    assert staff.listed() == []


def test_session_ends_7_days_after_its_sign_in_in_spite_of_use(staff: Staff) -> None:
    key = staff.begin(staff.hire("ann"))
    for _ in range(27):
        staff.kit.advance(6 * HOUR)
        found = staff.sessions.find(key)
        assert found is not None
        assert found.ended is None
        staff.sessions.note_seen(found.id)
    staff.kit.advance(6 * HOUR)
    found = staff.sessions.find(key)
    assert found is not None
    assert found.ended is Ended.EXPIRED
    staff.sessions.note_seen(found.id)
    assert staff.ended(key) is Ended.EXPIRED
    assert staff.listed() == []


def test_last_use_is_written_at_most_once_a_minute(staff: Staff) -> None:
    key = staff.begin(staff.hire("ann"))
    seen = []
    for _ in range(3):
        found = staff.sessions.find(key)
        assert found is not None
        seen.append(found.stale)
        staff.kit.advance(30)
    assert seen == [False, False, True]


def test_session_expires_by_the_clock_of_the_database(live_kit: Kit) -> None:
    staff = Staff(live_kit)
    ann = staff.hire("ann")
    keys = {name: staff.begin(ann, name) for name in ("fresh", "idle", "expired")}
    changes = {
        "idle": {"seen_at": live_kit.clock.now(-timedelta(hours=12, seconds=1))},
        "expired": {"created_at": live_kit.clock.now(-timedelta(days=7, seconds=1))},
    }
    with live_kit.database.transaction() as session:
        for name, values in changes.items():
            session.execute(update(OperatorSession).where(OperatorSession.user_agent == name).values(**values))
    found = {name: staff.ended(key) for name, key in keys.items()}
    assert found == {"fresh": None, "idle": Ended.IDLE, "expired": Ended.EXPIRED}
    assert staff.listed() == ["fresh"]


def test_only_the_digest_of_a_key_is_stored(staff: Staff) -> None:
    ann = staff.hire("ann")
    keys = {staff.begin(ann) for _ in range(3)}
    assert len(keys) == 3
    rows = str(staff.kit.rows("operator_sessions"))
    assert not [key for key in keys if key in rows]
    for key in ("", "nonsense", "\udcff", f"{ann.id}:1", keys.pop()[:-1]):
        assert staff.sessions.find(key) is None
    for row in staff.kit.rows("operator_sessions"):
        assert staff.sessions.find(row["key_hash"]) is None, "who reads the table has no key"


@pytest.mark.parametrize("change", ["disable", "password"])
def test_disabling_and_a_new_password_revoke_every_session_of_the_operator_and_no_other(
    staff: Staff, change: str
) -> None:
    ann, bob = staff.hire("ann"), staff.hire("bob")
    mine, other = [staff.begin(ann), staff.begin(ann)], staff.begin(bob)
    if change == "disable":
        staff.write(operators.set_active, "ann", False)
    else:
        staff.write(operators.set_password, "ann", "new")
    assert [staff.ended(key) for key in mine] == [Ended.REVOKED, Ended.REVOKED]
    if change == "disable":
        staff.write(operators.set_active, "ann", True)
        assert [staff.ended(key) for key in mine] == [Ended.REVOKED, Ended.REVOKED], "enabling brings none back"
    assert staff.ended(other) is None


@pytest.mark.parametrize("change", ["disable", "password"])
def test_sign_in_that_began_before_a_revocation_gets_no_session(staff: Staff, change: str) -> None:
    read_before = staff.hire("ann")
    if change == "disable":
        staff.write(operators.set_active, "ann", False)
    else:
        staff.write(operators.set_password, "ann", "new")
    assert staff.sessions.begin(read_before, None, None) is None
    assert staff.kit.rows("operator_sessions") == []


def test_sign_in_concurrent_with_a_new_password_leaves_no_session(live_kit: Kit) -> None:
    staff = Staff(live_kit)
    for number in range(5):
        ann = staff.hire(f"ann-{number}")
        key, _ = race(
            lambda ann=ann: staff.sessions.begin(ann, None, None),
            lambda ann=ann: staff.write(operators.set_password, ann.username, "new"),
        )
        assert key is None or staff.ended(key) is Ended.REVOKED


def test_concurrent_revocations_write_one_audit_row(live_kit: Kit) -> None:
    staff = Staff(live_kit)
    ann = staff.hire("ann")
    keys = [staff.begin(ann) for _ in range(3)]
    counts = race(*[lambda: staff.write(revoke_sessions, staff.kit.clock, ann.id, "ann")] * 3)
    assert sum(counts) == 3
    assert staff.audit() == [("operator.revoke_session", "ann")]
    assert {staff.ended(key) for key in keys} == {Ended.REVOKED}


@pytest.mark.parametrize("every", [True, False])
def test_session_within_longer_settings_of_a_web_process_is_listed_and_revoked(staff: Staff, every: bool) -> None:
    key = staff.begin(staff.hire("ann"))
    staff.kit.advance(13 * HOUR)
    web = OperatorSessions(staff.kit.database, SessionRules(Settings(session_idle_hours=24), staff.kit.clock))
    found = web.find(key)
    assert found is not None
    assert found.ended is None
    with staff.kit.database.read() as session:
        assert [(row.id, row.ended) for row in list_sessions(session, staff.rules)] == [(found.id, "idle")]
    revoke = (operators.revoke_operator_sessions, staff.kit.clock, "ann", None if every else found.id)
    assert [staff.write(*revoke), staff.write(*revoke)] == [1, 0]
    found = web.find(key)
    assert found is not None
    assert found.ended is Ended.REVOKED
    assert staff.audit() == [("operator.revoke_session", "ann")]


def test_sessions_are_listed_by_last_use(staff: Staff) -> None:
    ann, bob = staff.hire("ann"), staff.hire("bob")
    first = staff.begin(ann, "first")
    staff.kit.advance(60)
    staff.begin(bob, "second")
    staff.kit.advance(60)
    found = staff.sessions.find(first)
    assert found is not None
    staff.sessions.note_seen(found.id)
    assert staff.listed() == ["first", "second"]


def test_expired_sessions_are_deleted_in_batches_after_a_day(staff: Staff) -> None:
    ann = staff.hire("ann")
    for _ in range(25):
        staff.begin(ann)
    staff.kit.advance(DAY)
    kept = staff.begin(ann)
    retention = Retention(
        staff.kit.database,
        staff.kit.clock,
        keep_jobs=timedelta(days=180),
        keep_tombstones=timedelta(days=365),
        keep_sessions=timedelta(days=8),
        batch=1,
    )
    staff.kit.advance(7 * DAY - 1)
    assert retention.run().sessions == 0
    staff.kit.advance(1)
    assert retention.run().sessions == 25
    assert staff.ended(kept) is Ended.EXPIRED
    assert retention.run().sessions == 0


def test_deletion_of_an_operator_deletes_their_sessions(staff: Staff) -> None:
    key = staff.begin(staff.hire("ann"))
    with staff.kit.database.transaction() as session:
        session.delete(operators.get_operator(session, "ann"))
    assert staff.sessions.find(key) is None


def test_failed_write_of_the_last_use_refuses_nobody(sqlite_kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    staff = Staff(sqlite_kit)
    key = staff.begin(staff.hire("ann"))
    found = staff.sessions.find(key)
    assert found is not None

    def refuse(*_: object, **__: object) -> None:
        raise OperationalError("UPDATE", {}, Exception("disk full"))

    monkeypatch.setattr(sqlite_kit.database, "write", refuse)
    with capture_logs() as lines:
        staff.sessions.note_seen(found.id)
    assert [line["event"] for line in lines] == ["operator.session_use_unnoted"]
    assert staff.ended(key) is None
