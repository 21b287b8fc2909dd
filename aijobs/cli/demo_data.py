"""`aijobs demo-data`: run jobs with every kind of outcome, to look at in the console."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from aijobs import logs
from aijobs.cli.acting import shell_actor
from aijobs.cli.demo import SAMPLE_NOTES, read_text_file
from aijobs.cli.failures import Failure
from aijobs.cli.opening import json_option, open_services, write_json
from aijobs.cli.serving import served
from aijobs.cli.terminal import Terminal
from aijobs.jobs.requests import CreatedJob, CreateJobInput
from aijobs.jobs.status import FINAL, JobState
from aijobs.local.station import Stopped, StopRequests
from aijobs.operators.actions import Operating
from aijobs.settings import Settings

if TYPE_CHECKING:
    from aijobs.wiring.services import Services

LONGEST_WAIT_S = 120.0
_LOOK_S = 0.2


@dataclass(frozen=True)
class Plan:
    """A job to create. `then`: cancel or retry it afterwards."""

    name: str
    user_id: str
    calls: tuple[dict[str, Any], ...]
    then: str | None = None


_FINE = {"sleep_ms": 150, "output": {"said": "done"}, "artifacts": 3}

PLANS = (
    Plan("plain", "ada", (_FINE,)),
    Plan("plain-2", "lin", (_FINE,)),
    Plan("without-artifacts", "sam", ({"sleep_ms": 400, "output": {"said": "nothing to keep"}},)),
    Plan("second-try", "ada", ({"raise": "PROVIDER_UNAVAILABLE"}, _FINE)),
    Plan("third-try", "lin", ({"raise": "PROVIDER_RATE_LIMITED"}, {"raise": "VALIDATION_OUTPUT_NOT_JSON"}, _FINE)),
    Plan("never-answers", "sam", ({"sleep_ms": 50, "raise": "PROVIDER_UNAVAILABLE"},)),
    Plan("blocked", "mei", ({"raise": "CONTENT_SAFETY_BLOCKED"},)),
    Plan("bad-key", "mei", ({"raise": "CREDENTIAL_INVALID"},)),
    Plan("retried-in-vain", "sam", ({"raise": "PROVIDER_ACCOUNT_EXHAUSTED"},), then="retry"),
    Plan(JobState.CANCELLED, "ada", ({"sleep_ms": 60_000},), then="cancel"),
    Plan("cancelled-and-run-again", "lin", ({"sleep_ms": 2_000, "artifacts": 1},), then="cancel and retry"),
)


@click.command("demo-data")
@json_option
def demo_data(as_json: bool) -> None:
    """Create and run a small set of jobs to look at in the console: successes, retries, failures, cancels.

    Uses the workers of `aijobs up` if it runs, otherwise starts its own for the time. A second run creates nothing
    twice. Not for production.
    """
    settings = Settings.load()
    if settings.production:
        raise Failure("demo-data is not for production")
    logs.configure("ERROR")
    terminal = Terminal(sys.stderr if as_json else None)
    with (
        StopRequests().listening() as stop,
        served(settings, stop, terminal) as web,
        open_services() as services,
    ):
        made, operating = _make(services), Operating(services, shell_actor())
        job_ids = [job_id for _, job_id in made]

        def wait(ids: list[str]) -> None:
            _wait(services, ids, terminal, stop, web.look_after)

        for plan, job_id in made:
            if plan is not None and plan.then and plan.then.startswith("cancel"):
                operating.cancel(job_id)
        wait(job_ids)
        children = [
            operating.retry(job_id).job.id
            for plan, job_id in made
            if plan is not None and plan.then and plan.then.endswith("retry")
        ]
        wait([*job_ids, *children])
        states = Counter(services.monitor.get_job(job_id).job.lifecycle_status for job_id in [*job_ids, *children])
    if as_json:
        write_json({"created": len(job_ids) + len(children), "states": dict(states)})
    elif not states:
        terminal.say(f"The jobs are all there already. See them in the console: {web.console()}")
    else:
        said = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        terminal.say(f"Made {states.total()} jobs: {said}. See them in the console: {web.console()}")


def _make(services: Services) -> list[tuple[Plan | None, str]]:
    """Create the missing jobs: flashcards from the sample notes, and one for each plan."""
    made: list[tuple[Plan | None, CreatedJob]] = []
    for number, path in enumerate(sorted(SAMPLE_NOTES.glob("*.txt"))):
        user_id = ("ada", "lin")[number % 2]
        key = f"demo-data-{path.stem}"
        made.append((None, services.flashcards.create(user_id, read_text_file(path).notes, key)))
    for plan in PLANS:
        request = CreateJobInput(
            user_id=plan.user_id,
            job_type="synthetic",
            target_type="script",
            target_id=plan.name,
            input={"calls": list(plan.calls)},
            idempotency_key=f"demo-data-{plan.name}",
        )
        made.append((plan, services.jobs.create_job(request)))
    return [(plan, result.job.id) for plan, result in made if result.created]


def _wait(
    services: Services,
    job_ids: list[str],
    terminal: Terminal,
    stop: StopRequests,
    look_after: Callable[[], None],
) -> None:
    deadline = time.monotonic() + LONGEST_WAIT_S
    said = -1
    while job_ids:
        states = [services.monitor.get_job(job_id).job.lifecycle_status for job_id in job_ids]
        done = sum(state in FINAL for state in states)
        if done != said:
            terminal.progress(f"{done} of {len(job_ids)} jobs are final")
            said = done
        if done == len(job_ids):
            return
        if time.monotonic() > deadline:
            raise Failure(f"{len(job_ids) - done} jobs aren't final after {LONGEST_WAIT_S:g} s")
        if stop.wait(_LOOK_S):
            raise Stopped("stopped")
        look_after()
