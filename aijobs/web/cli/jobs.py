"""`aijobs job`, `cancel` and `retry`: one job, from the shell of a machine that has the database."""

from __future__ import annotations

import click

from aijobs.clock import iso
from aijobs.errors import describe
from aijobs.monitor.views import HistoryEntry, JobDetail
from aijobs.web.cli.acting import shell_actor
from aijobs.web.cli.opening import json_option, open_services, to_json, write_json
from aijobs.web.cli.terminal import Terminal
from aijobs.web.operating import Operating


@click.command()
@click.argument("job_id", metavar="ID")
@click.option("--internal", is_flag=True, help="Show the internal error message too.")
@json_option
def job(job_id: str, internal: bool, as_json: bool) -> None:
    """Show one job: state, phase, timeline, deliveries, provider calls. Never its content."""
    with open_services() as services:
        detail = services.monitor.get_detail(job_id, internal=internal)
    if as_json:
        write_json(to_json(detail))
    else:
        _print(Terminal(), detail)


def _print(terminal: Terminal, detail: JobDetail) -> None:
    row = detail.job
    terminal.say(terminal.style(f"{row.job_type} {row.id}", bold=True))
    phase = "" if row.phase == row.lifecycle_status else f" ({row.phase})"
    facts = [
        ("state", f"{row.lifecycle_status}{phase}, {row.progress} %"),
        ("user", row.user_id),
        ("target", f"{row.target_type} {row.target_id}"),
        ("queue", f"{row.queue_name}, priority {row.priority}"),
        ("attempt", f"{row.attempt_no} (errors {row.retry_count} of {row.max_retry_count}, lost {row.lost_count})"),
        ("held by", row.locked_by),
        ("next attempt", iso(row.next_attempt_at) if row.next_attempt_at else None),
        ("error", f"{row.error_code}: {describe(row.error_code).message()}" if row.error_code else None),
        ("internal", detail.internal_error_message),
        ("retry of", row.parent_job_id),
        ("retried as", row.retried_as),
        ("artifacts", str(len(detail.artifacts)) if detail.artifacts else None),
    ]
    for name, value in facts:
        if value:
            terminal.say(f"  {name:<13} {value}")
    _print_timeline(terminal, detail.history)
    terminal.say(terminal.style("Deliveries", bold=True))
    for event in detail.outbox:
        at = f" at {iso(event.published_at)}" if event.published_at else f", due {iso(event.available_at)}"
        again = f", sent again {event.redrives}×" if event.redrives else ""
        trouble = f", {event.last_error}" if event.last_error else ""
        terminal.say(f"  {event.event_type:<17} {event.status}{at}{again}{trouble}  {event.id}")
    if detail.usage:
        terminal.say(terminal.style("Provider calls", bold=True))
    for call in detail.usage:
        took = f" in {call.latency_ms} ms" if call.latency_ms is not None else ""
        terminal.say(f"  attempt {call.attempt_no}  {call.provider} {call.model}: {call.state}{took}")


def _print_timeline(terminal: Terminal, history: tuple[HistoryEntry, ...]) -> None:
    terminal.say(terminal.style("Timeline", bold=True))
    for entry in history:
        since = (entry.at - history[0].at).total_seconds()
        notes = [entry.error_code or "", f"{entry.duration_ms} ms" if entry.duration_ms is not None else ""]
        said = "  ".join(note for note in (*notes, entry.actor) if note)
        terminal.say(f"  {iso(entry.at)}  +{since:.3f} s  attempt {entry.attempt_no}  {entry.type:<17} {said}")


@click.command()
@click.argument("job_id", metavar="ID")
@json_option
def cancel(job_id: str, as_json: bool) -> None:
    """Cancel a job. A job that runs ends within a second or two; one that is final stays as it is."""
    with open_services() as services:
        cancelled = Operating(services, shell_actor()).cancel(job_id)
    before, after = cancelled.before, cancelled.after
    if as_json:
        write_json({"jobId": job_id, "lifecycleStatus": after.lifecycle_status, "phase": after.phase})
    else:
        click.echo(f"{job_id} is {after.phase}" + (" already" if before.phase == after.phase else ""))


@click.command()
@click.argument("job_id", metavar="ID")
@json_option
def retry(job_id: str, as_json: bool) -> None:
    """Run a failed or cancelled job again, as a new job; prints the new job's id."""
    with open_services() as services:
        result = Operating(services, shell_actor()).retry(job_id)
    if as_json:
        write_json({"jobId": result.job.id, "parentJobId": job_id, "created": result.created})
    else:
        click.echo(f"{result.job.id}" + ("" if result.created else " (is retrying it already)"))
