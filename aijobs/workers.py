"""What `huey_consumer` runs: `aijobs.workers.interactive`, `.background` and `.maintenance`.

Importing this needs neither database nor broker nor settings; a consumer reads them when it starts.
"""

from __future__ import annotations

import gc

# Hardly anything of what is loaded now is garbage, and to look for it is a fifth of a worker's start.
gc.disable()

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import OperationalError

from aijobs.definitions.definition import BACKGROUND, INTERACTIVE, MAINTENANCE_QUEUE
from aijobs.errors import SettingsError
from aijobs.jobs.models import PASSES
from aijobs.queues.crew import Crew
from aijobs.queues.hueys import AiJobsHuey
from aijobs.wiring.passes import build_job_crew, build_maintenance_crew
from aijobs.wiring.services import build_services


@contextmanager
def _database_must_answer() -> Iterator[None]:
    try:
        yield
    except OperationalError as error:
        kind = type(error.orig).__name__
        raise SettingsError(f"the database at AIJOBS_DATABASE_URL doesn't answer ({kind})") from None


def _build_jobs(queue: AiJobsHuey) -> Crew:
    with _database_must_answer():
        services = build_services(queue.settings, workers=queue.workers)
        return build_job_crew(services, queue.queue_name, queue.abandon, workers=queue.workers)


def _build_passes(queue: AiJobsHuey) -> Crew:
    with _database_must_answer():
        return build_maintenance_crew(build_services(queue.settings))


interactive = AiJobsHuey(INTERACTIVE.queue_name, _build_jobs)
background = AiJobsHuey(BACKGROUND.queue_name, _build_jobs)
maintenance = AiJobsHuey(MAINTENANCE_QUEUE, _build_passes)

interactive.add_job_task()
background.add_job_task()

# How often each comes stands in the settings. The scheduler runs them itself, a thread each.
for _duty in PASSES:
    maintenance.add_pass(_duty)

gc.freeze()
gc.enable()
