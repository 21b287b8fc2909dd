"""`python -m bench.reliability`: what becomes of jobs when a worker is killed, when one comes back from the dead, and
when Redis forgets everything. Exit code 1 if a job is lost or done twice, or if a promise is broken.

    undisturbed  the same jobs with nothing going wrong, for comparison
    kill         SIGKILL to the one worker process at 40 %, a new one at once; all settings as they come
    zombie       SIGSTOP to worker A at 40 % with jobs in hand, B goes on and takes them over, SIGCONT to A
    flush        FLUSHALL at 40 %; all settings as they come
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from aijobs import logs
from bench.bench_job import ENDED, STARTED
from bench.site import SERVERS, Machine, Site
from tests.support.processes import Program, Run
from tests.support.servers import ServerMissing

SLEEP_MS = 50
FAULT_AT = 0.4
LIMIT_S = 120.0
"""How long we wait for the last job before those that are left count as lost."""
FREEZE_TRIES = 400

SHORT_LEASES = {
    "AIJOBS_LEASE_S": "2",
    "AIJOBS_HEARTBEAT_S": "0.5",
    "AIJOBS_LEASE_GRACE_S": "1",
    "AIJOBS_REAPER_S": "1",
}
"""For the zombie alone: with the leases as they come, a takeover would be a minute and a half of waiting."""


@dataclass
class Outcome:
    """The figures of one run. Seconds are from the workers' start, or as their names say."""

    database: str
    run: str
    jobs: int
    done: int = 0
    lost: int = 0
    """Not succeeded when the waiting was over."""
    results_twice: int = 0
    started_twice: int = 0
    """Jobs whose code began more than once: for a real job type, a provider that may be paid twice."""
    seconds: float = 0.0
    times_undisturbed: float | None = None
    """`seconds` by those of as many jobs undisturbed, on the same database in this run of the program."""
    details: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    @property
    def known(self) -> str:
        """The details as people read them."""
        return ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in self.details.items())

    @property
    def is_sound(self) -> bool:
        return not (self.lost or self.results_twice or self.broken)


# --- the four runs -------------------------------------------------------------------------------------------------


def undisturbed(machine: Machine, jobs: int) -> Outcome:
    """The measure for the others."""
    with _at_work(machine, jobs) as (site, _):
        seconds = site.wait_until(lambda: not site.count_open(), LIMIT_S)
        return _outcome(machine, "undisturbed", site, jobs, seconds)


def kill(machine: Machine, jobs: int) -> Outcome:
    """kill -9 of the one worker, and a new one at once, as a supervisor would start it."""
    with _at_work(machine, jobs) as (site, worker):
        before = _wait_for_fault(site, jobs)
        worker.kill()
        done = site.count_done()
        site.spawn("interactive", "-w", "2")
        after = site.wait_until(lambda: not site.count_open(), LIMIT_S)
        outcome = _outcome(machine, "kill", site, jobs, before + after)
        outcome.details = {
            "done_at_the_kill": done,
            "restart_to_end_s": round(after, 1),
            "lost_messages_sent_again": site.count_redrives(),
        }
        return outcome


def zombie(machine: Machine, jobs: int) -> Outcome:
    """A worker stands still past its leases, others take its jobs, and then it goes on as if nothing had been."""
    with _at_work(machine, jobs, **SHORT_LEASES) as (site, a):
        before = _wait_for_fault(site, jobs)
        held = _freeze_in_hand(site, a)
        site.spawn("interactive", "-w", "2")
        after = site.wait_until(lambda: not site.count_open(), LIMIT_S)
        done_before_thaw = site.count_done()
        a.thaw()
        site.wait_until(lambda: len(_late(site, a, held)) == len(held), LIMIT_S)
        # The late results are on their way; what they could do to a row they do before the next job's turn.
        site.create([jobs], 0)
        site.wait_until(lambda: not site.count_open(), LIMIT_S)
        a.stop()
        outcome = _outcome(machine, "zombie", site, jobs, before + after, extra=1)
        refused = _refused(a) & site.taken_over(number for number, _ in held)
        outcome.details = {
            "in_hand_when_frozen": len(held),
            "freeze_to_all_done_s": round(after, 1),
            "done_before_it_came_back": done_before_thaw,
            "late_results": len(_late(site, a, held)),
            "late_results_refused": len(refused),
        }
        if len(refused) != len(held):
            outcome.broken.append(
                f"{len(held)} jobs were in hand, and only of {len(refused)} a late result was refused"
            )
        return outcome


def flush(machine: Machine, jobs: int) -> Outcome:
    """Redis forgets every message in the middle of it."""
    with _at_work(machine, jobs) as (site, _):
        before = _wait_for_fault(site, jobs)
        waiting = site.services.broker.pending_count("ai-interactive")
        site.valkey.flush()
        after = site.wait_until(lambda: not site.count_open(), LIMIT_S)
        outcome = _outcome(machine, "flush", site, jobs, before + after)
        outcome.details = {"messages_lost": waiting, "messages_sent_again": site.count_redrives()}
        return outcome


RUNS: dict[str, Callable[[Machine, int], Outcome]] = {
    "undisturbed": undisturbed,
    "kill": kill,
    "zombie": zombie,
    "flush": flush,
}
SHARES = {"undisturbed": 1.0, "kill": 1.0, "zombie": 0.2, "flush": 2.0}
"""How many of `--jobs` each has: 500, 500, 100 and 1,000."""


# --- their parts ---------------------------------------------------------------------------------------------------


@contextmanager
def _at_work(machine: Machine, jobs: int, **settings: str) -> Iterator[tuple[Site, Program]]:
    """A site with all jobs waiting, a maintenance consumer, and one worker that has just begun."""
    with machine.site(**settings) as site:
        site.create(range(jobs), SLEEP_MS)
        site.start("maintenance", "-w", "1")
        yield site, site.start("interactive", "-w", "2")


def _wait_for_fault(site: Site, jobs: int) -> float:
    return site.wait_until(lambda: site.count_done() >= jobs * FAULT_AT, LIMIT_S)


def _in_hand(site: Site, pid: int) -> set[tuple[int, int]]:
    """The runs (job's number, attempt) of this process's code that have begun and not ended."""
    runs = Counter[tuple[int, int]]()
    for entry in site.entries():
        if entry.pid == pid:
            runs[entry.number, entry.attempt_no] += 1 if entry.what == STARTED else -1
    return {run for run, count in runs.items() if count}


def _freeze_in_hand(site: Site, worker: Program) -> set[tuple[int, int]]:
    """Freeze the worker while both its threads are in a job's code, and so in no transaction; those runs."""
    for _ in range(FREEZE_TRIES):
        site.wait_until(lambda: len(_in_hand(site, worker.pid)) == 2, 10, look_s=0.001)
        worker.freeze()
        site.wait_until(lambda: _stands_still(worker.pid), 10, look_s=0.001)
        held = _in_hand(site, worker.pid)
        if len(held) == 2:
            return held
        worker.thaw()
    raise AssertionError("the worker was never found with two jobs in hand")


def _stands_still(pid: int) -> bool:
    """Whether each thread has taken the signal: on a busy machine some run on for a while."""
    states = [task.read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    return bool(states) and set(states) == {"T"}


def _late(site: Site, worker: Program, held: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those of the held runs whose code has come to its end after all."""
    ended = {(e.number, e.attempt_no) for e in site.entries() if e.pid == worker.pid and e.what == ENDED}
    return held & ended


def _refused(worker: Program) -> set[str]:
    """The jobs of which a worker's log says that another had them."""
    lines = [json.loads(line) for line in worker.output.splitlines() if '"job.lock_lost"' in line]
    return {line["jobId"] for line in lines}


def _outcome(machine: Machine, name: str, site: Site, jobs: int, seconds: float, extra: int = 0) -> Outcome:
    done = site.count_done() - extra
    begun = Counter(entry.number for entry in site.entries() if entry.what == STARTED and entry.number < jobs)
    return Outcome(
        database=machine.kind,
        run=name,
        jobs=jobs,
        done=done,
        lost=jobs - done,
        results_twice=sum(count > 1 for count in site.results().values()),
        started_twice=sum(count > 1 for count in begun.values()),
        seconds=round(seconds, 1),
        broken=site.broken_promises(),
    )


# --- the program ---------------------------------------------------------------------------------------------------


def measure(kind: str, names: Sequence[str], jobs: int, say: Callable[[str], None]) -> list[Outcome]:
    """The runs on one kind of database. `ServerMissing`."""
    run = Run()
    outcomes: list[Outcome] = []
    try:
        with Machine(run, kind) as machine:
            for name in names:
                say(f"{kind}: {name} …")
                outcome = RUNS[name](machine, max(10, round(jobs * SHARES[name])))
                say(f"  {outcome.done} of {outcome.jobs} done in {outcome.seconds} s  {outcome.known}")
                outcomes.append(outcome)
    finally:
        run.close()
    base = next((outcome for outcome in outcomes if outcome.run == "undisturbed"), None)
    for outcome in outcomes:
        if base is not None and base.seconds and outcome.run in ("kill", "flush"):
            share = base.seconds * outcome.jobs / base.jobs
            outcome.times_undisturbed = round(outcome.seconds / share, 2)
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """The figures as people read them."""
    heads = ("database", "run", "jobs", "done", "lost", "results twice", "started twice", "seconds", "ratio", "check")
    rows: list[tuple[str, ...]] = [heads]
    for o in outcomes:
        ratio = "" if o.times_undisturbed is None else f"{o.times_undisturbed:.2f}"
        numbers = (o.jobs, o.done, o.lost, o.results_twice, o.started_twice, f"{o.seconds:.1f}", ratio)
        rows.append((o.database, o.run, *map(str, numbers), "broken" if o.broken else "sound"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for o in outcomes:
        lines += [f"{o.database}, {o.run}: {o.known}"] if o.details else []
        lines += [f"{o.database}, {o.run}: BROKEN {what}" for what in o.broken]
    lines.append("ratio: the seconds, by those of as many jobs undisturbed")
    return "\n".join(lines)


def end_by_signal(number: int, frame: FrameType | None) -> None:
    """Let a signal end the program as an exception would, so that nothing that it started is left."""
    raise SystemExit(128 + number)


def main() -> int:
    """Read the command line, measure, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.reliability", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--database", action="append", choices=tuple(SERVERS), help="repeatable; else all there are")
    parser.add_argument("--run", action="append", choices=tuple(RUNS), help="repeatable; else all")
    parser.add_argument(
        "--jobs", type=int, default=500, help="of one run; the zombie has a fifth, the flush twice that"
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, end_by_signal)
    logs.configure("CRITICAL")
    outcomes: list[Outcome] = []
    machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    for kind in given.database or tuple(SERVERS):
        try:
            outcomes += measure(kind, given.run or tuple(RUNS), given.jobs, lambda text: print(text, file=sys.stderr))
        except ServerMissing as missing:
            print(f"{kind}: left out, {missing}", file=sys.stderr)
    sound = bool(outcomes) and all(outcome.is_sound for outcome in outcomes)
    if given.json:
        print(json.dumps({"machine": machine, "is_sound": sound, "outcomes": [asdict(o) for o in outcomes]}, indent=2))
    else:
        print(f"{machine['cpus']} cpus, load {machine['load']:.1f} at the start, Python {machine['python']}\n")
        print(table(outcomes))
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
