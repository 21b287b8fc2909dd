"""`python -m bench.check_speed`: how `aijobs check` grows with the jobs. Exit code 1 where it finds something in sound
jobs.

The same check over few jobs and over many, on an otherwise idle database: each rule's share of the whole, and how many
times longer it takes with the many than with the few. On SQLite also which big tables a rule reads as a whole.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from aijobs import logs
from aijobs.db.clock import DatabaseClock
from aijobs.db.database import Database
from aijobs.monitor.check import Check
from aijobs.monitor.check_rules import RULES, Rule
from bench.many_jobs import TABLES, seed
from bench.site import SERVERS
from tests.support.processes import Run
from tests.support.rows import prepare_database
from tests.support.servers import Server, ServerMissing

FEW, MANY = 10_000, 1_000_000
TIMES = 3
"""How often each rule runs; the fastest time counts, as other work on the machine only adds."""
_SCAN = re.compile(r"(?:SCAN (?P<table>[a-z_]+?)(?:_\d+)?\b|SEARCH (?P<indexed>[a-z_]+?)(?:_\d+)? USING AUTOMATIC)")
"""Also a table that SQLite would first make an index of, for this statement alone."""


@dataclass(frozen=True)
class Measured:
    """What a rule took over the few and over the many jobs, in seconds, and the big tables that it reads whole."""

    rule: str
    few_s: float
    many_s: float
    reads: tuple[str, ...]

    @property
    def ratio(self) -> float:
        return self.many_s / self.few_s


def find_scans(database: Database, rule: Rule) -> tuple[str, ...]:
    """The big tables that SQLite reads whole for a rule, be it by an index that holds all that is asked for."""
    query = Check(database, DatabaseClock(), None).query(rule)
    statement = query.compile(database.engine, compile_kwargs={"literal_binds": True})
    with database.engine.connect() as connection:
        plan = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}")]
    scans = (match["table"] or match["indexed"] for line in plan if (match := _SCAN.match(line)))
    return tuple(sorted(table for table in scans if table in (*TABLES, "job_tombstones")))


def measure(kind: str, few: int, many: int) -> list[Measured]:
    """Each rule over both. `ServerMissing`; `SystemExit` where a rule finds something."""
    run = Run()
    try:
        with _filled(run, kind, few) as small:
            before = {rule.what: _seconds(small, rule) for rule in RULES}
        with _filled(run, kind, many) as big:
            return [
                Measured(
                    rule.what,
                    before[rule.what],
                    _seconds(big, rule),
                    find_scans(big, rule) if kind == "sqlite" else (),
                )
                for rule in RULES
            ]
    finally:
        run.close()


@contextmanager
def _filled(run: Run, kind: str, jobs: int) -> Iterator[Database]:
    databases = SERVERS[kind](run)
    if isinstance(databases, Server):
        databases.start()
    try:
        database = Database(databases.create_database(prepare_database))
        begin = time.monotonic()
        seed(database, jobs)
        if kind != "sqlite":
            _analyze(database, kind)
        print(f"{kind}: {jobs} jobs in {time.monotonic() - begin:.0f} s", file=sys.stderr)
        yield database
        database.dispose()
    finally:
        if isinstance(databases, Server):
            databases.stop()


def _analyze(database: Database, kind: str) -> None:
    """What a server does by itself in the hours in which so many jobs come to be."""
    words = "VACUUM ANALYZE" if kind == "postgresql" else "ANALYZE TABLE"
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in TABLES:
            connection.exec_driver_sql(f"{words} {table}")


def _seconds(database: Database, rule: Rule) -> float:
    check, taken = Check(database, DatabaseClock(), None), []
    for _ in range(TIMES):
        begin = time.perf_counter()
        if found := check.find_broken(rule):
            raise SystemExit(f"{rule.what}: {len(found)} sound jobs, {found[0]} the first")
        taken.append(time.perf_counter() - begin)
    return min(taken)


def table(kind: str, found: Sequence[Measured]) -> str:
    """The figures as people read them, the dearest rules first."""
    few, many = sum(m.few_s for m in found), sum(m.many_s for m in found)
    lines = [f"{kind}: {many:.1f} s, {many / few:.0f} times as long as with the few", ""]
    for m in sorted(found, key=lambda m: -m.many_s):
        reads = f"  reads {', '.join(m.reads)}" if m.reads else ""
        lines.append(f"{m.many_s / many:6.1%}  x{m.ratio:<5.0f} {m.rule}{reads}")
    return "\n".join(lines)


def main() -> int:
    """Read the command line, measure, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.check_speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--database", action="append", choices=tuple(SERVERS), help="repeatable; else sqlite")
    parser.add_argument("--few", type=int, default=FEW, help="the jobs to compare with (%(default)s)")
    parser.add_argument("--jobs", type=int, default=MANY, help="a multiple of 10,000 (%(default)s)")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    given = parser.parse_args()
    logs.configure("CRITICAL")
    found: Mapping[str, list[Measured]] = {}
    machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    for kind in given.database or ("sqlite",):
        try:
            found = {**found, kind: measure(kind, given.few, given.jobs)}
        except ServerMissing as missing:
            print(f"{kind}: left out, {missing}", file=sys.stderr)
    if given.json:
        rules = {kind: [{**asdict(m), "ratio": m.ratio} for m in each] for kind, each in found.items()}
        print(json.dumps({"machine": machine, "few": given.few, "many": given.jobs, "rules": rules}, indent=2))
    else:
        print(
            f"{machine['cpus']} cpus, load {machine['load']:.1f} at the start, {given.jobs} jobs against {given.few}\n"
        )
        print("\n\n".join(table(kind, each) for kind, each in found.items()))
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
