"""The connection pool of a process is large enough for its concurrent jobs."""

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
def test_pool_grows_with_the_number_of_workers(settings: Settings, workers: int, kept: int) -> None:
    database = build_services(settings, workers=workers).database
    try:
        assert database.engine.pool.size() == kept  # type: ignore[attr-defined]
    finally:
        database.dispose()


def test_queue_knows_its_number_of_workers_when_the_crew_is_built(settings: Settings) -> None:
    workers: list[int] = []

    def build(queue: AiJobsHuey) -> Crew:
        workers.append(queue.workers)
        return Crew(run_job=lambda message: None)

    queue = AiJobsHuey("ai-interactive", build, load_settings=lambda: settings)
    queue.add_job_task()
    queue.create_consumer(workers=50)
    assert workers == [50]
