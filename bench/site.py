"""What a measurement runs on: a fresh database, an empty broker, and consumers started as in production."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from sqlalchemy import func, select

from aijobs.db.schema import upgrade
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreateJobInput
from aijobs.jobs.status import FINAL, JobState
from aijobs.monitor.check import Check
from aijobs.monitor.check_rules import Bounds
from aijobs.outbox.models import OutboxEvent
from aijobs.settings import Settings
from aijobs.wiring.services import build_services
from bench import bench_job
from tests.support.databases import Databases, MariaDbServer, PostgresServer, SqliteDatabases
from tests.support.processes import Program, Run
from tests.support.servers import Server, ValkeyServer

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 60.0
USERS = 50

SERVERS: Mapping[str, Callable[[Run], Databases]] = {
    "sqlite": SqliteDatabases,
    "postgresql": PostgresServer,
    "mariadb": MariaDbServer,
}


class Machine:
    """The servers of all measurements on one kind of database."""

    def __init__(self, run: Run, kind: str) -> None:
        """`ServerMissing` where a program isn't on this machine."""
        self.run, self.kind = run, kind
        self.databases = SERVERS[kind](run)
        self.valkey = ValkeyServer(run)
        self.plug_in = run.new_folder("plug-in")
        _write_entry_point(self.plug_in)
        if str(self.plug_in) not in sys.path:
            sys.path.insert(0, str(self.plug_in))

    def __enter__(self) -> Machine:
        self.valkey.start()
        if isinstance(self.databases, Server):
            self.databases.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.valkey.stop()
        if isinstance(self.databases, Server):
            self.databases.stop()
        sys.path.remove(str(self.plug_in))

    @contextmanager
    def site(self, **settings: str) -> Iterator[Site]:
        """A site of its own for one measurement; all its consumers end with it."""
        self.valkey.flush()
        url = self.databases.create_database()
        site = Site(self, url, settings)
        try:
            yield site
        finally:
            site.close()
            self.databases.drop_database(url)


class Site:
    """A database, a broker and the consumers on them."""

    def __init__(self, machine: Machine, database_url: str, settings: Mapping[str, str]) -> None:
        self._run, self._plug_in = machine.run, machine.plug_in
        self._folder = machine.run.new_folder("site")
        self._programs: list[Program] = []
        self.valkey = machine.valkey
        self.ledger = self._folder / "ledger"
        self.env = {
            "AIJOBS_INSTANCE_PATH": str(self._folder),
            "AIJOBS_DATABASE_URL": database_url,
            "AIJOBS_REDIS_URL": machine.valkey.url,
            "AIJOBS_MESSAGE_KEYS": f"k1:{'m' * 32}",
            "AIJOBS_CREDENTIAL_KEYS": f"k1:{'c' * 32}",
            "AIJOBS_SECRET_KEY": "s" * 32,
            "AIJOBS_JWT_SECRET": "j" * 32,
            "AIJOBS_USER_ACTIVE_JOBS": "0",
            **settings,
        }
        self.services = build_services(Settings.load(self.env))
        engine = self.services.database.engine
        upgrade(engine)
        bench_job.METADATA.create_all(engine)

    def close(self) -> None:
        """End every consumer, frozen ones too."""
        for program in reversed(self._programs):
            program.stop()
        self.services.broker.client.close()
        self.services.database.dispose()

    # --- work --------------------------------------------------------------------------------------------------

    def create(self, numbers: Iterable[int], sleep_ms: int) -> None:
        """Jobs as a business service makes them, each with its event, its message handed over by its creator."""
        for number in numbers:
            # Users with a few jobs each, who ask by turns.
            user = f"bench-{number % USERS}"
            task = {"number": number, "sleep_ms": sleep_ms}
            self.services.jobs.create_job(CreateJobInput(user, bench_job.JOB_TYPE, "bench", str(number), task))

    def spawn(self, queue: str, *options: str) -> Program:
        """A consumer by its production command; doesn't wait for it."""
        program = Program(
            self._run,
            [Path(sys.executable).with_name("huey_consumer"), f"aijobs.workers.{queue}", *options],
            name=queue,
            env={**self.env, bench_job.LEDGER: str(self.ledger), "PYTHONPATH": f"{self._plug_in}:{ROOT}"},
            cwd=self._folder,
        )
        self._programs.append(program)
        return program

    def start(self, queue: str, *options: str) -> Program:
        """A consumer that is at work."""
        program = self.spawn(queue, *options)
        program.wait_for_output("Huey consumer started", timeout=START_TIMEOUT_S)
        return program

    # --- what came of it ---------------------------------------------------------------------------------------

    def count_done(self) -> int:
        """Jobs that have succeeded."""
        return self._count(AiJob.lifecycle_status == JobState.SUCCEEDED)

    def count_cancelled(self) -> int:
        """Jobs that were cancelled."""
        return self._count(AiJob.lifecycle_status == JobState.CANCELLED)

    def count_open(self) -> int:
        """Jobs that have not ended."""
        return self._count(AiJob.lifecycle_status.not_in(FINAL))

    def _count(self, *where: object) -> int:
        with self.services.database.read() as session:
            return session.execute(select(func.count()).select_from(AiJob).where(*where)).scalar_one()  # type: ignore[arg-type]

    def wait_until(self, reached: Callable[[], bool], limit_s: float, look_s: float = 0.05) -> float:
        """Wait, at most so long; the seconds that it took."""
        begin = time.monotonic()
        while not reached() and time.monotonic() - begin < limit_s:
            time.sleep(look_s)
        return time.monotonic() - begin

    def taken_over(self, numbers: Iterable[int]) -> set[str]:
        """The ids of the jobs with these numbers that another attempt than the first has ended."""
        wanted = [str(number) for number in numbers]
        with self.services.database.read() as session:
            query = select(AiJob.id).where(AiJob.target_id.in_(wanted), AiJob.attempt_no > 1)
            return set(session.execute(query).scalars())

    def results(self) -> Counter[str]:
        """How many results each job has."""
        return bench_job.count_results(self.services.database)

    def entries(self) -> list[bench_job.Entry]:
        """The job type's own books."""
        return bench_job.read_ledger(self.ledger)

    def count_redrives(self) -> int:
        """Messages that were sent again because the broker had lost them."""
        with self.services.database.read() as session:
            total = session.execute(select(func.coalesce(func.sum(OutboxEvent.redrives), 0))).scalar_one()
        return int(total)  # MariaDB answers with a decimal.

    def broken_promises(self) -> list[str]:
        """What `aijobs check` finds when nothing is given any time."""
        now = timedelta()
        strict = Bounds(lease_lost=now, undelivered=now, cancel=now, open_call=now)
        report = Check(self.services.database, self.services.clock, self.services.broker, strict).run()
        found = [f"promise {f.promise}: {f.count} x {f.what}" for f in report.findings]
        return found if report.broker == "asked" else [*found, f"the broker was {report.broker}"]


def _write_entry_point(folder: Path) -> None:
    """What an installed package with our job type would bring."""
    metadata = folder / "aijobs_bench-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: aijobs-bench\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[aijobs.job_types]\nbench = bench.bench_job\n")
