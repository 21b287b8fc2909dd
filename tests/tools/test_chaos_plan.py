"""The plan of a chaos run."""

from __future__ import annotations

import pytest

from tests.chaos.plan import build_plan
from tests.chaos.provider import STEPS


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"])
def test_seed_determines_the_plan(database: str) -> None:
    plan = build_plan(5, 60, database)
    assert str(plan) == str(build_plan(5, 60, database))
    assert str(plan) != str(build_plan(6, 60, database))


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"])
def test_plan_of_a_minute_contains_every_kind_of_fault_and_action(database: str) -> None:
    plan = build_plan(5, 60, database)
    faults = {(fault.kind, fault.target.partition("-")[0]) for fault in plan.faults}
    for expected in (("kill", "web"), ("kill", "maintenance"), ("freeze", "maintenance"), ("freeze", "broker")):
        assert expected in faults
    kinds = ("crash", "kill", "freeze", "freeze at", "term", "flush", "stop", "drop", "refuse", "outage")
    assert {kind for kind, _ in faults} == {*kinds}
    assert ("stop", "provider") in faults
    assert (("kill", "database") in faults) == (database != "sqlite")
    assert {action.kind for action in plan.actions} == {"create", "repeat", "cancel", "retry"}


def test_every_second_job_calls_a_server_and_scripts_use_every_step() -> None:
    creates = [action.create for action in build_plan(5, 600, "sqlite").actions if action.kind == "create"]
    served = [create for create in creates if create.is_served]
    assert 0.4 < len(served) / len(creates) < 0.6
    assert {answer for create in served for answer in create.script.answers} == set(STEPS)
