"""A process's connections suffice for what it is told to do at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from aijobs.queues.crew import Crew
from aijobs.queues.hueys import AiJobsHuey
from aijobs.settings import Settings
from aijobs.wiring.services import build_services


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.load({"AIJOBS_INSTANCE_PATH": str(tmp_path), "AIJOBS_REDIS_URL": "redis://127.0.0.1:1/0"})


@pytest.mark.parametrize(("workers", "kept"), [(1, 10), (5, 10), (50, 55)])
def test_many_jobs_at_once_leave_connections_for_beats(settings: Settings, workers: int, kept: int) -> None:
    database = build_services(settings, workers=workers).database
    try:
        assert database.engine.pool.size() == kept  # type: ignore[attr-defined]
    finally:
        database.dispose()


def test_a_consumer_tells_its_crew_how_many_jobs_it_will_run_at_once(settings: Settings) -> None:
    told: list[int] = []

    def build(queue: AiJobsHuey) -> Crew:
        told.append(queue.workers)
        return Crew(run_job=lambda message: None)

    queue = AiJobsHuey("ai-interactive", build, load_settings=lambda: settings)
    queue.add_job_task()
    queue.create_consumer(workers=50)
    assert told == [50]
