"""Random sequences of requests, steps, process deaths and faults: the promises hold, and without faults every job ends.

The short profile runs the same examples each time, the long one searches for new ones. A failure shows its program,
which `actions.play` can run again on any database.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
import structlog
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from sqlalchemy import and_, or_

from tests.statemachine.actions import ACTIONS, KINDS_OF_ACTION, improvise, play
from tests.statemachine.faulty import FaultyDatabase
from tests.statemachine.invariants import Invariants
from tests.statemachine.world import Broken, World, open_world
from tests.support.databases import SqliteDatabases
from tests.support.jobs import prepare_database


@pytest.fixture(scope="module", autouse=True)
def no_lines() -> Iterator[None]:
    """Switch logging off, which would take a fifth of the time."""
    before = structlog.get_config()
    quiet = structlog.make_filtering_bound_logger(logging.CRITICAL)
    structlog.configure(wrapper_class=quiet, cache_logger_on_first_use=False)  # A cached one would stay quiet.
    yield
    structlog.configure(**before)


@pytest.fixture(scope="module")
def database(sqlite: SqliteDatabases) -> Iterator[FaultyDatabase]:
    """Open one database for all examples, so that SQLAlchemy compiles each statement once; each example empties it."""
    url = sqlite.create_database(prepare_database)
    opened = FaultyDatabase(url)
    yield opened
    opened.dispose()
    sqlite.drop_database(url)


def _step(kind: str) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """Return a strategy for an action of this kind and its values."""
    names = st.sampled_from(KINDS_OF_ACTION[kind])
    return names.flatmap(
        lambda name: st.tuples(
            st.just(name), st.fixed_dictionaries({key: st.sampled_from(of) for key, of in ACTIONS[name].items()})
        )
    )


class Deployment(RuleBasedStateMachine):
    """One example: a new world, whose actions Hypothesis chooses."""

    database: ClassVar[FaultyDatabase]

    def __init__(self) -> None:
        super().__init__()
        self._opened = open_world(self.database)
        self.world: World = self._opened.__enter__()
        self.checker = Invariants(self.world)
        self.is_broken = False

    def act(self, step: tuple[str, dict[str, Any]]) -> None:
        """Perform the action, if it can act on something, and check the invariants."""
        name, values = step
        if not self.world.can(name):
            return
        try:
            self.world.act(name, **values)
            self.checker.check()
        except Exception as error:
            self.is_broken = True
            error.add_note(f"the program was: {self.world.program!r}")
            raise

    @rule(step=_step("ask"))
    def ask(self, step: Any) -> None:
        self.act(step)

    @rule(step=_step("arrive"))
    @precondition(lambda self: self.world.can("deliver"))
    def arrive(self, step: Any) -> None:
        self.act(step)

    @rule(step=_step("deliver"))
    @precondition(lambda self: self.world.can("deliver") or self.world.can("deliver_again"))
    def deliver(self, step: Any) -> None:
        self.act(step)

    @rule(step=_step("work"))
    @precondition(lambda self: self.world.can("work"))
    def work(self, step: Any) -> None:
        self.act(step)

    @rule(step=_step("step"))
    @precondition(lambda self: self.world.can("go_on") or self.world.can("answer"))
    def step_on(self, step: Any) -> None:
        self.act(step)

    @rule(step=_step("watch"))
    @precondition(lambda self: self.world.can("watch"))
    def watch(self, step: Any) -> None:
        self.act(step)

    @rule(step=_step("advance"))
    def advance(self, step: Any) -> None:
        self.act(step)

    @rule(step=_step("upkeep"))
    @precondition(lambda self: self.world.can("reap"))
    def upkeep(self, step: Any) -> None:
        self.act(step)

    @rule(step=_step("trouble"))
    @precondition(lambda self: self.world.can("reap"))
    def trouble(self, step: Any) -> None:
        self.act(step)

    def teardown(self) -> None:
        """Check that every job ends without faults, unless the example has already failed."""
        try:
            if not self.is_broken:
                self.checker.check_until_all_ended()
        except Exception as error:
            error.add_note(f"the program was: {self.world.program!r}")
            raise
        finally:
            self._opened.__exit__(None, None, None)


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
SHORT = settings(
    max_examples=10, stateful_step_count=40, derandomize=True, database=None, deadline=None, suppress_health_check=QUIET
)
LONG = settings(SHORT, max_examples=200, stateful_step_count=60, derandomize=False, print_blob=True)


def test_no_sequence_of_steps_deaths_and_faults_breaks_a_promise(database: FaultyDatabase) -> None:
    Deployment.database = database
    run_state_machine_as_test(Deployment, settings=SHORT)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_no_long_sequence_found_at_random_breaks_a_promise(database: FaultyDatabase) -> None:
    Deployment.database = database
    run_state_machine_as_test(Deployment, settings=LONG)


def _play_seeds(database: FaultyDatabase, seeds: range, steps: int) -> None:
    for seed in seeds:
        with open_world(database) as world:
            play(world, improvise(seed, steps, world))


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_no_program_made_from_a_seed_breaks_a_promise(database: FaultyDatabase) -> None:
    _play_seeds(database, range(150), steps=60)


def test_state_machine_detects_a_worker_that_writes_without_its_lease(
    database: FaultyDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test the state machine itself: without fencing it must fail."""
    from aijobs.jobs.lifecycle import changes, end, lease
    from aijobs.jobs.models import AiJob

    anybody = or_(changes.HELD, and_(changes.THE_JOB, AiJob.lifecycle_status == "running"))
    for module in (changes, lease, end):
        monkeypatch.setattr(module, "HELD", anybody)
    with pytest.raises(Broken):
        _play_seeds(database, range(10, 60), steps=40)
