"""`python -m tests.chaos [--database KIND] [--seed N] [--minutes M | --seconds S]`: exit code 1 on a broken promise."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy.exc import DBAPIError

from aijobs import logs
from aijobs.monitor.check import Check
from aijobs.monitor.check_rules import Bounds
from tests.chaos import crashes
from tests.chaos.driver import Driver
from tests.chaos.evidence import count_open, find_open_jobs, gather
from tests.chaos.faults import DROPPED, Faults
from tests.chaos.ledger import read_lines
from tests.chaos.plan import Plan, build_plan
from tests.chaos.provider import Provider
from tests.chaos.report import count_crashes, summary, timeline
from tests.chaos.stage import SERVERS, Stage
from tests.chaos.verdict import Broken, judge, judge_report, judge_roles
from tests.support.servers import ServerMissing

RECOVERY_S = 45.0
RECOVERY_PER_JOB_S = 0.5
"""How soon after the last fault everything must have ended: a fixed time, and more for each open job."""
CHECK_EVERY_S = 5.0
SHOWN_JOBS = 5
MEANWHILE = replace(Bounds(), undelivered=timedelta(minutes=5), lease_lost=timedelta(minutes=5))
"""Longer limits for the check during the run, because processes die all the time and the broker is often away. The
check after the last fault allows no delay."""
AFTERWARDS = 1_000_000
EXIT_MISSING = 3


class Game:
    """One run of a plan on a stage."""

    def __init__(self, stage: Stage, plan: Plan, kind: str) -> None:
        self.stage, self.plan, self.kind = stage, plan, kind
        self.driver = Driver(stage.env, stage.port)
        self.faults = Faults(stage, self.driver)
        self.broken: list[Broken] = []
        self.times: dict[str, float] = {}

    def play(self) -> None:
        """Perform the plan, wait until everything has ended, and judge."""
        self._timed("chaos", self._perform)
        self._timed("recovery", self._recover)
        self._timed("verdict", self._judge)

    def _timed(self, name: str, part: Callable[[], None]) -> None:
        begin = time.monotonic()
        part()
        self.times[name] = time.monotonic() - begin

    def _perform(self) -> None:
        steps: list[tuple[float, Callable[[Any], None], Any]] = [
            *((action.at, self.driver.perform, action) for action in self.plan.actions),
            *((fault.at, self.faults.perform, fault) for fault in self.plan.faults),
        ]
        begin = time.monotonic()
        next_check = CHECK_EVERY_S
        running: list[Future[None]] = []
        with ThreadPoolExecutor(8) as callers, ThreadPoolExecutor(16) as breakers:
            for at, perform, step in sorted(steps, key=lambda entry: entry[0]):
                time.sleep(max(0.0, begin + at - time.monotonic()))
                pool = callers if perform == self.driver.perform else breakers
                running.append(pool.submit(perform, step))
                if at > next_check:
                    next_check += CHECK_EVERY_S
                    running.append(callers.submit(self._check_meanwhile))
        for future in running:
            future.result()

    def _check_meanwhile(self) -> None:
        """Check that the promises hold during the run too."""
        try:
            report = Check(self.driver.database, self.driver.services.clock, None, MEANWHILE).run()
        except DBAPIError:
            return  # The database is one of the fault targets.
        self.broken += judge_report(report, "in the middle")

    def _recover(self) -> None:
        self.faults.heal()
        self.stage.wait_until_ready()
        seconds = RECOVERY_S + RECOVERY_PER_JOB_S * count_open(self.driver.database).get("jobs", 0)
        ends = time.monotonic() + seconds
        while still := count_open(self.driver.database):
            if time.monotonic() > ends:
                open_jobs = tuple(find_open_jobs(self.driver.database))
                self.broken.append(Broken(f"not ended {seconds:g} s after the last fault: {still}", open_jobs))
                return
            self.faults.thaw()
            time.sleep(0.2)
        job_id = self.driver.create_afterwards(AFTERWARDS)
        while count_open(self.driver.database):
            if time.monotonic() > ends:
                self.broken.append(Broken("a job created after the last fault does not end", (job_id,)))
                return
            self.faults.thaw()
            time.sleep(0.05)

    def _judge(self) -> None:
        services = self.driver.services
        still = count_open(services.database)
        self.evidence = gather(services.database, self.stage.crash_folder / "ledger", self.stage.provider.bill)
        self.broken += judge_roles(self.stage.roles)
        if still:  # Open jobs can't be judged yet.
            if not self.broken:
                self.broken.append(Broken(f"open again after all had ended: {still}"))
            return
        now = timedelta()
        strict = Bounds(lease_lost=now, undelivered=now, redrive=timedelta(seconds=3), cancel=now, open_call=now)
        report = Check(services.database, services.clock, services.broker, strict).run()
        self.broken += judge_report(report, "at the end")
        if report.broker != "asked":
            self.broken.append(Broken(f"the broker was {report.broker} at the end"))
        database_faults = any(fault.target == "database" for fault in self.plan.faults)
        self.broken += judge(self.evidence, self.driver.book, database_faults=database_faults)

    def summary(self) -> str:
        """Return the summary of the run."""
        folder, book = self.stage.crash_folder, self.driver.book
        died = count_crashes(read_lines(folder / crashes.CRASHES))
        dropped = len(read_lines(folder / DROPPED))
        outputs = self.stage.outputs()
        return summary(self.plan, self.kind, book, self.faults, died, dropped, self.evidence, outputs, self.times)

    def complaint(self) -> str:
        """Return the list of broken promises, with the timelines of the first jobs."""
        lines = [f"BROKEN  {broken.what}  {', '.join(broken.job_ids[:3])}" for broken in self.broken]
        job_ids = list(dict.fromkeys(job_id for broken in self.broken for job_id in broken.job_ids))
        shown = [timeline(self.evidence, self.driver.book, job_id) for job_id in job_ids[:SHOWN_JOBS]]
        return "\n".join([*lines, "", *shown])


def keep(stage: Stage, plan: Plan, text: str, folder: Path | None) -> Path:
    """Copy logs, plan and report out of the run's temporary folder; return the new folder."""
    kept = Path(tempfile.mkdtemp(prefix=f"aijobs-chaos-{plan.seed}-", dir=folder))
    for source in stage.crash_folder.iterdir():
        shutil.copy(source, kept)
    for database in stage.run.folder.glob("sqlite-*/*.db*"):
        shutil.copy(database, kept)
    for name, outputs in stage.outputs().items():
        for number, output in enumerate(outputs, 1):
            (kept / f"{name}.{number}.log").write_text(output)
    (kept / "plan.txt").write_text(str(plan))
    (kept / "report.txt").write_text(text + "\n")
    return kept


def run(kind: str, plan: Plan, folder: Path | None) -> int:
    """Perform one run and return the exit code."""
    begin = time.monotonic()
    provider = Provider({action.create.number: action.create for action in plan.actions}.values())
    with provider, Stage(kind, provider) as stage:
        sys.path.insert(0, str(stage.plug_in))
        game = Game(stage, plan, kind)
        game.times["start"] = time.monotonic() - begin
        try:
            game.play()
        except BaseException as error:
            kept = keep(stage, plan, f"{type(error).__name__}: {error}", folder)
            print(f"seed {plan.seed} on {kind}: the run failed before its verdict; logs in {kept}", file=sys.stderr)
            raise
        finally:
            game.driver.close()
        print(game.summary())
        if not game.broken:
            print(f"{'verdict':>13}  every promise was kept")
            if folder is not None:
                print(f"{'logs':>13}  {keep(stage, plan, game.summary(), folder)}")
            return 0
        complaint = game.complaint()
        kept = keep(stage, plan, f"{game.summary()}\n{complaint}", folder)
        print(
            f"{complaint}\n\nReplay: python -m tests.chaos --database {kind} --seed {plan.seed} "
            f"--seconds {plan.seconds:g}\nLogs, plan and ledger: {kept}"
        )
        return 1


def main() -> int:
    """Parse the arguments and perform one run."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--database", choices=tuple(SERVERS), default="sqlite")
    parser.add_argument("--seed", type=int, help="the sequence of actions and faults; default: random")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=None)
    length.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--keep", type=Path, help="a folder for the logs, even of a successful run")
    parser.add_argument("--plan", action="store_true", help="print the sequence and exit")
    given = parser.parse_args()
    seconds = given.seconds if given.seconds is not None else 60 * (given.minutes or 1)
    seed = given.seed if given.seed is not None else random.randrange(1_000_000)
    plan = build_plan(seed, seconds, given.database)
    if given.plan:
        print(plan, end="")
        return 0
    logs.configure("CRITICAL")
    try:
        return run(given.database, plan, given.keep)
    except ServerMissing as missing:
        print(missing, file=sys.stderr)
        return EXIT_MISSING


if __name__ == "__main__":
    sys.exit(main())
