"""`python -m bench.providers`: jobs whose calls go over a socket to a pretend server, against the same jobs with the
built-in provider; a cancel, until the server sees its client leave; and a server that loses each first answer. Exit
code 1 if a job is lost, if the server was asked more or less often than it should be, or if a promise is broken.

    in process   the built-in provider makes the cards in the worker, for comparison
    server       a server answers at once, to as many calls at a time as the worker has threads
    slow server  the same, and each answer takes 200 ms: what more calls at once are worth
    cancel       calls that hang, each cancelled once the server has it
    lost answer  a server that does the work and closes the connection, at each job's first call
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

from sqlalchemy import func, select

from aijobs import logs
from aijobs.ai.models import AiUsageLog
from aijobs.job_types.flashcard_generation import SAMPLE_INPUT, SAMPLE_OUTPUT
from aijobs.jobs.models import AiJob
from aijobs.testing.fakellm import Answer, FakeLlm, Step, faults
from aijobs.testing.fakellm.request import Request
from bench.reliability import LIMIT_S, end_by_signal
from bench.site import SERVERS, START_TIMEOUT_S, Machine, Site
from tests.support.processes import Run
from tests.support.servers import ServerMissing

AT_ONCE = (1, 2, 4)
SLOW_S, LONG, EVENTS = 0.2, 1_000_000, 5
"""A slow answer's seconds; its content goes in one delta, and a stream of one has five events."""
WATCHER_S = 0.5
WARM_UP = 2
"""Jobs for each thread that are over before the clock starts: the first call of a process loads the client."""
PROVIDERS = """
[provider.pretend]
base_url = "{url}/v1"
models = ["dev-1"]
key = "none"

[routes]
default = ["pretend/dev-1"]
"""
_TITLE = re.compile(r"^Title: (.+)$", re.MULTILINE)


@dataclass
class Figures:
    """One row of the table."""

    run: str
    at_once: int
    jobs: int
    done: int = 0
    """Jobs that ended as they should."""
    calls: int = 0
    """Requests that reached the server."""
    wanted_calls: int = 0
    most_at_once: int = 0
    """Calls that the server had in hand at one time."""
    jobs_per_s: float | None = None
    ratio: float | None = None
    """What it is of, its run's line says."""
    details: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    @property
    def known(self) -> str:
        """The details as people read them."""
        return ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in self.details.items())

    @property
    def is_sound(self) -> bool:
        return self.done == self.jobs and self.calls == self.wanted_calls and not self.broken


class LostAnswers:
    """Has a server lose the answer of the first call about each of some notes."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._titles: set[str] = set()

    def lose(self, titles: Iterable[str]) -> None:
        """Lose the next answer about each of these."""
        with self._guard:
            self._titles = set(titles)

    def choose(self, request: Request) -> Step | None:
        """The step of such a call; None for any other."""
        with self._guard:
            if (title := _title(request)) not in self._titles:
                return None
            self._titles.remove(title)
        return faults.close_after_work()


class Bench:
    """A machine and a server, and how each measurement uses them."""

    def __init__(self, machine: Machine, llm: FakeLlm, lost_answers: LostAnswers) -> None:
        self._machine, self._llm, self._lost_answers = machine, llm, lost_answers
        self._file = machine.run.new_folder("providers") / "providers.toml"
        self._file.write_text(PROVIDERS.format(url=llm.url))

    @contextmanager
    def _at_work(self, jobs: int, threads: int, *, served: bool) -> Iterator[tuple[Site, list[str]]]:
        """A site with all jobs waiting, and a worker that has just begun; with the jobs' ids."""
        settings = {"AIJOBS_PROVIDERS": str(self._file)} if served else {}
        with self._machine.site(AIJOBS_WATCHER_S=f"{WATCHER_S:g}", **settings) as site:
            ids = [_create(site, number) for number in range(jobs)]
            upkeep = site.spawn("maintenance", "-w", "1")
            site.start("background", "-w", str(threads))
            upkeep.wait_for_output("Huey consumer started", timeout=START_TIMEOUT_S)
            yield site, ids

    def throughput(self, run: str, threads: int, jobs: int, answer: Step | None) -> Figures:
        """How many jobs a second, with a server that gives `answer`, or (None) with the built-in provider."""
        warm_up = WARM_UP * threads
        self._llm.forget()
        if answer is not None:
            self._llm.script(answer)
        with self._at_work(jobs + warm_up, threads, served=answer is not None) as (site, _):
            site.wait_until(lambda: not site.count_open(), LIMIT_S)
            calls = self._llm.calls
            return Figures(
                run,
                threads,
                jobs + warm_up,
                done=site.count_done(),
                calls=len(calls),
                wanted_calls=0 if answer is None else jobs + warm_up,
                most_at_once=_most_at_once(self._llm),
                jobs_per_s=_rate(site, warm_up),
                broken=site.broken_promises(),
            )

    def cancel(self, jobs: int) -> Figures:
        """From a cancel until the server sees that the client has left."""
        waits: list[float] = []
        self._llm.forget()
        self._llm.script(faults.hang())
        with self._at_work(jobs, 1, served=True) as (site, _):
            for number in range(1, jobs + 1):
                self._llm.wait_for_calls(number, LIMIT_S)
                (job_id,) = _running(site)
                begin = time.monotonic()
                site.services.jobs.cancel(job_id, "user:bench")
                self._llm.wait_until_left(number, LIMIT_S)
                waits.append(time.monotonic() - begin)
            site.wait_until(lambda: not site.count_open(), LIMIT_S)
            cancelled = site.count_cancelled()
            figures = Figures("cancel", 1, jobs, cancelled, len(self._llm.calls), jobs, 1)
            figures.ratio = round(statistics.median(waits) / WATCHER_S, 2)
            figures.details = {"longest_by_the_watchers_interval": round(max(waits) / WATCHER_S, 2)}
            figures.broken = site.broken_promises()
            return figures

    def lost_answer(self, jobs: int) -> Figures:
        """Two calls a job, and no third; the first of them is put down as possibly billed."""
        self._llm.forget()
        self._lost_answers.lose(f"Notes {number}" for number in range(jobs))
        with self._at_work(jobs, 4, served=True) as (site, _):
            site.wait_until(lambda: not site.count_open(), LIMIT_S)
            calls = Counter(_title(call.request) for call in self._llm.calls)
            most = _most_at_once(self._llm)
            figures = Figures("lost answer", 4, jobs, site.count_done(), calls.total(), 2 * jobs, most)
            figures.ratio = round(calls.total() / jobs, 2)
            billed = _billed(site)
            figures.details = {"rows_billed": billed["yes"], "possibly_billed": billed["unknown"]}
            figures.broken = site.broken_promises()
            if billed != {"yes": jobs, "unknown": jobs}:
                figures.broken.append(f"of {2 * jobs} calls, half of them with an answer, the rows say {dict(billed)}")
            return figures


def _create(site: Site, number: int) -> str:
    """A job for cards, from notes of its own title."""
    notes = {**SAMPLE_INPUT, "source": {"id": f"n{number}", "title": f"Notes {number}"}}
    return site.services.flashcards.create(f"bench-{number // 10}", notes).job.id


def _title(request: Request) -> str:
    found = _TITLE.search(request.text("user"))
    return found[1] if found else ""


def _running(site: Site) -> list[str]:
    with site.services.database.read() as session:
        return list(session.execute(select(AiJob.id).where(AiJob.lifecycle_status == "running")).scalars())


def _billed(site: Site) -> Counter[str]:
    with site.services.database.read() as session:
        rows = session.execute(select(AiUsageLog.billed, func.count()).group_by(AiUsageLog.billed))
        return Counter({str(word): int(count) for word, count in rows})


def _rate(site: Site, warm_up: int) -> float:
    """Jobs a second from the end of the last warm-up job on, by the database's clock."""
    with site.services.database.read() as session:
        ends = session.execute(select(AiJob.finished_at).order_by(AiJob.finished_at)).scalars().all()
    timed = [at for at in ends if at is not None]
    seconds = (timed[-1] - timed[warm_up - 1]).total_seconds()
    return round((len(timed) - warm_up) / max(seconds, 0.001), 1)


def _most_at_once(llm: FakeLlm) -> int:
    """By the server's log: the most calls that it had in hand at one time."""
    calls = [(call.received_at.timestamp(), call.ended_after_s) for call in llm.calls]
    spans = [(begin, begin + lasted) for begin, lasted in calls if lasted is not None]
    steps = sorted(chain.from_iterable(((begin, 1), (end, -1)) for begin, end in spans))
    most = now = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most


# --- the program ---------------------------------------------------------------------------------------------------


def _throughput(bench: Bench, jobs: int) -> Iterator[Figures]:
    at_once = Answer(json.dumps(SAMPLE_OUTPUT), delta_chars=LONG)
    slow = replace(at_once, delta_s=SLOW_S / EVENTS)
    alone: float | None = None
    for threads in AT_ONCE:
        own = bench.throughput("in process", threads, jobs, None)
        yield own
        served = bench.throughput("server", threads, jobs, at_once)
        served.ratio = _ratio(served.jobs_per_s, own.jobs_per_s)
        yield served
        slowly = bench.throughput("slow server", threads, jobs, slow)
        alone = alone or slowly.jobs_per_s
        slowly.ratio = _ratio(slowly.jobs_per_s, alone)
        yield slowly


def _ratio(rate: float | None, other: float | None) -> float | None:
    return round(rate / other, 2) if rate and other else None


RUNS: dict[str, Callable[[Bench, int], Iterable[Figures]]] = {
    "throughput": _throughput,
    "cancel": lambda bench, jobs: [bench.cancel(max(3, jobs // 3))],
    "lost answer": lambda bench, jobs: [bench.lost_answer(max(4, jobs // 2))],
}


def measure(kind: str, names: Sequence[str], jobs: int, say: Callable[[str], None]) -> list[Figures]:
    """The rows of these runs, on one kind of database. `ServerMissing`."""
    run = Run()
    rows: list[Figures] = []
    lost_answers = LostAnswers()
    try:
        with FakeLlm(on_request=lost_answers.choose) as llm, Machine(run, kind) as machine:
            bench = Bench(machine, llm, lost_answers)
            for figures in chain.from_iterable(RUNS[name](bench, jobs) for name in names):
                say(f"{kind}: {figures.run}, {figures.at_once} at once: {figures.done} of {figures.jobs}")
                rows.append(figures)
    finally:
        run.close()
    return rows


def table(rows: list[Figures]) -> str:
    """The figures as people read them."""
    heads = ("run", "at once", "jobs", "done", "calls", "most at once", "jobs/s", "ratio", "check")
    lines: list[tuple[str, ...]] = [heads]
    for f in rows:
        rate, ratio = ("" if n is None else f"{n:g}" for n in (f.jobs_per_s, f.ratio))
        numbers = (f.at_once, f.jobs, f.done, f.calls, f.most_at_once)
        lines.append((f.run, *map(str, numbers), rate, ratio, "sound" if f.is_sound else "broken"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    told = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    for f in rows:
        told += [f"{f.run}: " + ", ".join(f"{k.replace('_', ' ')}: {v}" for k, v in f.details.items())] * bool(
            f.details
        )
        told += [f"{f.run}, {f.at_once} at once: BROKEN {what}" for what in f.broken]
    return "\n".join([*told, *RATIOS])


RATIOS = (
    "ratio, server: its jobs a second by those in process with as many threads",
    "ratio, slow server: its jobs a second by those with one call at once",
    "ratio, cancel: the median from a cancel to the server seeing the client leave, by the watcher's interval",
    "ratio, lost answer: calls a job",
)


def main() -> int:
    """Read the command line, measure, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.providers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--database", choices=tuple(SERVERS), default="sqlite")
    parser.add_argument("--run", action="append", choices=tuple(RUNS), help="repeatable; else all")
    parser.add_argument("--jobs", type=int, default=30, help="of one run, besides those that warm up")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, end_by_signal)
    logs.configure("CRITICAL")
    machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    try:
        rows = measure(given.database, given.run or tuple(RUNS), given.jobs, lambda text: print(text, file=sys.stderr))
    except ServerMissing as missing:
        print(f"{given.database}: {missing}", file=sys.stderr)
        return 1
    sound = all(figures.is_sound for figures in rows)
    if given.json:
        figures = [asdict(f) for f in rows]
        print(json.dumps({"machine": machine, "is_sound": sound, "figures": figures}, indent=2))
    else:
        print(f"{machine['cpus']} cpus, load {machine['load']:.1f} at the start, Python {machine['python']}\n")
        print(table(rows))
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
