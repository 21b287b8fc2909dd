"""`aijobs check` and `aijobs prune`: check the promises in the database, and delete what is old."""

from __future__ import annotations

import click

from aijobs.cli.opening import json_option, open_services, to_json, write_json
from aijobs.cli.terminal import Terminal
from aijobs.monitor.check import Check, Finding, Report
from aijobs.monitor.check_rules import PROMISES, Bounds
from aijobs.wiring.passes import build_retention


@click.command()
@click.option("--show", default=20, type=click.IntRange(1, 10_000), help="How many job ids to name for each finding.")
@json_option
def check(show: int, as_json: bool) -> int:
    """Check the database against what aijobs promises. Exit code 1 if something is broken.

    It only reads, and may run at any time, also under traffic. Run it after an incident.
    """
    with open_services() as services:
        bounds = Bounds.from_settings(services.settings)
        report = Check(services.database, services.clock, services.broker, bounds).run(show)
    if as_json:
        write_json({**to_json(report), "isSound": report.is_sound})
    else:
        _print(Terminal(), report)
    return 0 if report.is_sound else 1


def _print(terminal: Terminal, report: Report) -> None:
    for finding in report.findings:
        terminal.say(terminal.style(f"Promise {finding.promise}: {PROMISES[finding.promise]}", bold=True))
        terminal.say(f"  {_count(finding)} {finding.what}:")
        for job_id in finding.job_ids:
            terminal.say(f"  {job_id}")
        if finding.count > len(finding.job_ids):
            terminal.say(f"  … and {finding.count - len(finding.job_ids)} more (--show)")
    looked = f"{report.jobs} jobs, {report.rules} rules, {report.seconds:.1f} s"
    if report.broker == "away":
        looked += "; the broker doesn't answer, so events that wait for it and lost messages were not looked for"
    terminal.say(f"All promises hold ({looked})." if report.is_sound else f"Broken ({looked}).")


def _count(finding: Finding) -> str:
    return "1 job" if finding.count == 1 else f"{finding.count} jobs"


@click.command()
@json_option
def prune(as_json: bool) -> int:
    """Delete jobs, tombstones and operators' sessions that are old enough. A pass does the same each hour."""
    with open_services() as services:
        pruned = build_retention(services).run()
    if as_json:
        write_json(to_json(pruned))
    else:
        left = f"; {pruned.failed} old chains could not be deleted, the log says why" if pruned.failed else ""
        click.echo(f"deleted {pruned.jobs} jobs, {pruned.tombstones} tombstones and {pruned.sessions} sessions{left}")
    return 1 if pruned.failed else 0
