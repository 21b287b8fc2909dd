"""`aijobs job`, `cancel` and `retry`: one job, from a shell with access to the database."""

from __future__ import annotations

import click

from aijobs import answers
from aijobs.cli.acting import shell_actor
from aijobs.cli.opening import json_option, open_services, to_json, write_json
from aijobs.cli.terminal import Terminal
from aijobs.clock import iso
from aijobs.definitions.definition import MOST_LOSSES
from aijobs.errors import describe
from aijobs.jobs.history import HistoryType
from aijobs.monitor.views import HistoryEntry, JobDetail, UsageTotal, Wait
from aijobs.operators.actions import Operating
from aijobs.outbox.models import OutboxState
from aijobs.web.explanations import WAITS, count_losses, explain_losses
from aijobs.web.money import format_money
from aijobs.web.shapes import with_explanation


@click.command()
@click.argument("job_id", metavar="ID")
@click.option("--internal", is_flag=True, help="Show the internal error message too.")
@json_option
def job(job_id: str, internal: bool, as_json: bool) -> None:
    """Show one job: state, phase, why it waits, timeline, deliveries, provider calls and their cost. Never its
    content.
    """
    with open_services() as services:
        detail = services.monitor.get_detail(job_id, internal=internal)
        wait = services.monitor.find_wait(detail)
    if as_json:
        shown = to_json(detail)
        del shown["waiting"], shown["lossExplanation"]
        write_json(shown | ({"waiting": answers.to_json(with_explanation(wait))} if wait else {}))
    else:
        _print(Terminal(), detail, wait)


def _print(terminal: Terminal, detail: JobDetail, wait: Wait | None) -> None:
    row = detail.job
    terminal.say(terminal.style(f"{row.job_type} {row.id}", bold=True))
    phase = "" if row.phase == row.lifecycle_status else f" ({row.phase})"
    facts = [
        ("state", f"{row.lifecycle_status}{phase}, {row.progress} %"),
        ("user", row.user_id),
        ("target", f"{row.target_type} {row.target_id}"),
        ("queue", f"{row.queue_name}, priority {row.priority}"),
        ("attempt", f"{row.attempt_no} (errors {row.retry_count} of {row.max_retry_count})"),
        ("lost", _losses(detail)),
        ("held by", row.locked_by),
        ("next attempt", iso(row.next_attempt_at) if row.next_attempt_at else None),
        ("because", str(WAITS[wait.reason].what) if wait else None),
        ("", wait.cause if wait else None),
        *(("", f"{b.scope}: {b.word}, {b.why}") for b in (wait.breakers if wait else ())),
        *(("" if n else "lost workers", told) for n, told in enumerate(explain_losses(detail))),
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
        unsent = ", never sent" if event.status == OutboxState.PUBLISHED else f", due {iso(event.available_at)}"
        at = f" at {iso(event.published_at)}" if event.published_at else unsent
        again = f", sent again {event.redrives}×" if event.redrives else ""
        trouble = f", {event.last_error}" if event.last_error else ""
        terminal.say(f"  {event.event_type:<17} {event.status}{at}{again}{trouble}  {event.id}")
    _print_calls(terminal, detail)


def _losses(detail: JobDetail) -> str:
    """Return the losses: `own process 1 of 2; shared process 1 (5 in all fail it)`, empty if none was lost."""
    losses = count_losses(detail)
    own = f"own process {losses.own} of {losses.most_own}" if losses.own else ""
    shared = f"shared process {losses.shared}" if losses.shared else ""
    inherited = f"retried job {losses.inherited}" if losses.inherited else ""
    said = "; ".join(part for part in (own, shared, inherited) if part)
    return f"{said} ({MOST_LOSSES} in all fail it)" if said else ""


def _print_calls(terminal: Terminal, detail: JobDetail) -> None:
    """Print the calls of the job with their sum, and the sum of its chain if it is longer."""
    if detail.chain_total.calls:
        terminal.say(terminal.style("Provider calls", bold=True))
    for call in detail.usage:
        facts = [
            f"{call.state}" + (f" in {call.latency_ms} ms" if call.latency_ms is not None else ""),
            f"HTTP {call.http_status}" if call.http_status is not None else "",
            call.error_code or "",
            _tokens(call.prompt_tokens, call.completion_tokens, call.cached_tokens),
            "estimated" if call.estimated else "",
            "cost unknown" if call.unpriced else "",
            format_money(call.cost_micros, call.currency) if call.cost_micros is not None else "",
            "possibly billed" if call.possibly_billed else "",
            f"request {call.request_id}" if call.request_id else "",
        ]
        said = ", ".join(fact for fact in facts if fact)
        terminal.say(f"  attempt {call.attempt_no}.{call.call_no}  {call.provider} {call.model}: {said}")
    if detail.usage:
        terminal.say(f"  this job     {_total(detail.usage_total)}")
    if len(detail.chain) > 1 and detail.chain_total.calls:
        terminal.say(f"  whole chain  {_total(detail.chain_total)}")


def _total(total: UsageTotal) -> str:
    """Return a sum: `3 calls, 1 failed, 1,200 + 340 tokens, $0.001234, 1 without a price`."""
    parts = [f"{total.calls} call{'' if total.calls == 1 else 's'}"]
    counted = {"failed": total.failed_calls, "lost": total.lost_calls, "under way": total.calls_under_way}
    parts += [f"{number} {name}" for name, number in counted.items() if number]
    parts.append(_tokens(total.prompt_tokens, total.completion_tokens, total.cached_tokens))
    parts += [format_money(cost.cost_micros, cost.currency) for cost in total.costs]
    marked = {
        "without a price": total.unpriced_calls,
        "estimated": total.estimated_calls,
        "possibly billed": total.possibly_billed_calls,
    }
    parts += [f"{number} {name}" for name, number in marked.items() if number]
    return ", ".join(part for part in parts if part)


def _tokens(prompt: int | None, completion: int | None, cached: int | None) -> str:
    if prompt is None and completion is None:
        return ""
    told = ["?" if count is None else f"{count:,}" for count in (prompt, completion)]
    return f"{told[0]}{f' ({cached:,} cached)' if cached else ''} + {told[1]} tokens"


def _print_timeline(terminal: Terminal, history: tuple[HistoryEntry, ...]) -> None:
    terminal.say(terminal.style("Timeline", bold=True))
    for entry in history:
        since = max(0.0, (entry.at - history[0].at).total_seconds())  # The database's clock may have gone back.
        uncharged = entry.type == HistoryType.LEASE_LOST and entry.error_code is None
        notes = [
            entry.error_code or ("not charged" if uncharged else ""),
            f"{entry.duration_ms} ms" if entry.duration_ms is not None else "",
        ]
        said = "  ".join(note for note in (*notes, entry.actor) if note)
        terminal.say(f"  {iso(entry.at)}  +{since:.3f} s  attempt {entry.attempt_no}  {entry.type:<17} {said}")


@click.command()
@click.argument("job_id", metavar="ID")
@json_option
def cancel(job_id: str, as_json: bool) -> None:
    """Cancel a job. A running job ends within a second or two; a final one stays as it is."""
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
    """Run a failed or cancelled job again, as a new job. Prints the new job's id."""
    with open_services() as services:
        result = Operating(services, shell_actor()).retry(job_id)
    if as_json:
        write_json({"jobId": result.job.id, "parentJobId": job_id, "created": result.created})
    else:
        click.echo(f"{result.job.id}" + ("" if result.created else " (is retrying it already)"))
