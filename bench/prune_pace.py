"""`python -m bench.prune_pace`: how long a create takes beside `aijobs prune`, compared with a create alone.

Two processes write to one database: this one creates jobs at a steady rate, and `aijobs prune` deletes old ones.
Windows with and without prune alternate, so that the machine's noise falls on both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import func, select

from aijobs import logs
from aijobs.jobs.models import AiJob
from bench.many_jobs import seed
from bench.site import SERVERS, Machine, Site
from tests.support.processes import Run
from tests.support.servers import ServerMissing

OLD_JOBS = 10_000
WINDOW_S, WINDOWS = 10.0, 4
CREATORS, PAUSE_S = 2, 0.05
"""Each creator waits so long between two creates: about 30 creates a second together."""


@contextmanager
def pruning(site: Site) -> Iterator[None]:
    """`aijobs prune` runs meanwhile; it must still have work at the end."""
    command = [Path(sys.executable).with_name("aijobs"), "prune"]
    prune = subprocess.Popen(command, env={**os.environ, **site.env}, stdout=subprocess.DEVNULL)
    try:
        time.sleep(2)  # Until it has started.
        yield
        if prune.poll() is not None:
            raise RuntimeError("prune ended before the window did: seed more old jobs")
    finally:
        prune.terminate()
        prune.wait()


def measure(site: Site) -> list[float]:
    """Milliseconds of each create in one window."""
    taken: list[float] = []
    ends = time.monotonic() + WINDOW_S

    def create(numbers: Iterator[int]) -> None:
        while time.monotonic() < ends:
            began = time.monotonic()
            site.create([next(numbers)], sleep_ms=0)
            taken.append((time.monotonic() - began) * 1000)
            time.sleep(PAUSE_S)

    threads = [threading.Thread(target=create, args=(iter(range(n, 10**9, CREATORS)),)) for n in range(CREATORS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken


def percentiles(taken: Sequence[float]) -> Mapping[str, float]:
    """p50, p95 and p99 in milliseconds."""
    cuts = statistics.quantiles(taken, n=100)
    return {"p50": round(cuts[49], 1), "p95": round(cuts[94], 1), "p99": round(cuts[98], 1)}


def run(kind: str) -> Mapping[str, object]:
    """All windows on one kind of database."""
    alone: list[float] = []
    beside: list[float] = []
    with closing(Run()) as run, Machine(run, kind) as machine, machine.site() as site:
        seed(site.services.database, OLD_JOBS)
        measure(site)  # Warm connections and statements.
        for _ in range(WINDOWS):
            alone += measure(site)
            with pruning(site):
                beside += measure(site)
        with site.services.database.read() as session:
            left = session.execute(
                select(func.count()).select_from(AiJob).where(AiJob.user_id.not_like("bench-%"))
            ).scalar_one()
    calm, busy = percentiles(alone), percentiles(beside)
    ratios = {name: round(busy[name] / calm[name], 2) for name in calm}
    return {"database": kind, "alone_ms": calm, "beside_prune_ms": busy, "ratio": ratios, "deleted": OLD_JOBS - left}


def main() -> int:
    """Print one line of JSON a database."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=[*SERVERS], default="sqlite")
    kind = parser.parse_args().database
    logs.configure("ERROR")
    try:
        print(json.dumps(run(kind)))
    except ServerMissing as missing:
        print(missing, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
