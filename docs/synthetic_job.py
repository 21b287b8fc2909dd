"""Make a job that does what it is told, for the walk-through: one argument an attempt, the last one repeated.

    .venv/bin/python docs/synthetic_job.py '{"raise": "PROVIDER_UNAVAILABLE"}' '{"sleep_ms": 500, "artifacts": 1}'

There is no endpoint for this: jobs come into being through `AiJobService.create_job`, which business services call.
This is the shortest one. The type `synthetic` is not registered in production.
"""

from __future__ import annotations

import json
import sys

from aijobs import logs
from aijobs.jobs.requests import CreateJobInput
from aijobs.settings import Settings
from aijobs.wiring.services import build_services


def main() -> None:
    """Create the job for the user `demo` and print its id."""
    logs.configure("ERROR")
    services = build_services(Settings.load())
    services.check_start()
    script = {"calls": [json.loads(argument) for argument in sys.argv[1:]]}
    created = services.jobs.create_job(CreateJobInput("demo", "synthetic", "script", "walk-through", script))
    sys.stdout.write(f"{created.job.id}\n")


if __name__ == "__main__":
    main()
