"""`make install` with real environments, for a project of two tiny packages and without network."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.contracts.sources import ROOT
from tests.support.processes import Run, clean_environment

BACKEND = """
import zipfile

WHEEL = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"

def build_editable(folder, config_settings=None, metadata_directory=None):
    return write_wheel(folder, "aijobs")

def write_wheel(folder, name):
    path = f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{path}", "w") as wheel:
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n")
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", WHEEL)
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "aijobs"
version = "1.0"
"""
OLD = "sys.version_info = (3, 9, 18, 'final', 0)"
WITHOUT_VENV = "sys.modules['ensurepip'] = None"


class Project:
    """A folder with the Makefile, its script, and packages that need no index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        (folder / "tests" / "support").mkdir(parents=True)
        for name in ("Makefile", "tests/support/set_up.sh"):
            shutil.copy(ROOT / name, folder / name)
        (folder / "backend.py").write_text(BACKEND)
        (folder / "pyproject.toml").write_text(PROJECT)
        self.lock("tiny_one")

    def lock(self, *names: str) -> None:
        """Pin these packages, and put them where pip finds them."""
        scope: dict[str, object] = {}
        exec(BACKEND, scope)
        lines = []
        for name in names:
            path = self.wheels / scope["write_wheel"](str(self.wheels), name)  # type: ignore[operator]
            lines.append(f"{name}==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n")
        (self.folder / "requirements.lock").write_text("".join(lines))

    def install(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `make install` without a terminal and without pauses between lines of progress."""
        found = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels), "SET_UP_EVERY_S": "0"}
        environment = clean_environment(found)
        for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKE_TERMOUT", "MAKE_TERMERR"):  # Of the make that runs us.
            environment.pop(name, None)
        return subprocess.run(
            ["make", "install", *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )

    def interpreter(self, name: str, change: str) -> Path:
        """Write an interpreter that behaves like ours after `change`."""
        path = self.folder / name
        path.write_text(f"#!{sys.executable}\nimport sys\n{change}\nexec(sys.argv[2])\n")
        path.chmod(0o755)
        return path


@pytest.fixture
def project(run: Run) -> Project:
    return Project(run.new_folder("project"))


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """Return the one line before make's own."""
    assert done.returncode == 2
    line, makes_own = done.stderr.splitlines()
    assert makes_own.startswith("make: ***")
    return line


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (OLD, "is Python 3.9.18, and aijobs needs 3.11 or newer"),
        ("sys.exit(127)", "doesn't start, and aijobs needs Python 3.11 or newer"),
        (WITHOUT_VENV, "has no venv"),
    ],
)
def test_unusable_interpreter_is_refused_in_one_line(project: Project, change: str, said: str) -> None:
    python = project.interpreter("python", change)
    line = refusal(project.install(f"PYTHON={python}"))
    assert str(python) in line
    assert said in line
    assert not (project.folder / ".venv").exists()


def test_missing_interpreter_is_refused_in_one_line(project: Project) -> None:
    assert "PYTHON=python3.99 doesn't start" in refusal(project.install("PYTHON=python3.99"))


@pytest.mark.long
def test_other_interpreter_creates_a_new_environment_and_the_same_one_keeps_it(project: Project) -> None:
    venv = project.folder / ".venv"
    (venv / "bin").mkdir(parents=True)
    shutil.move(project.interpreter("python", OLD), venv / "bin" / "python")
    (venv / ".installed").touch()
    (venv / "left-by-the-old-one").touch()

    made = project.install(f"PYTHON={sys.executable}")
    assert made.returncode == 0, made.stderr
    version = ".".join(map(str, sys.version_info[:3]))
    assert made.stderr.splitlines()[0].startswith(f"Setting up .venv with Python {version}")
    assert "of 1 packages" in made.stderr
    assert ".venv is ready" in made.stderr.splitlines()[-1]
    assert not (venv / "left-by-the-old-one").exists()
    assert installed(venv) >= {"tiny_one", "aijobs"}

    assert project.install(f"PYTHON={sys.executable}").stderr == ""
    assert project.install().stderr == ""

    project.lock("tiny_one", "tiny_two")
    os.utime(project.folder / "requirements.lock", times=(2e9, 2e9))
    (venv / "kept").touch()
    updated = project.install()
    assert updated.stderr.startswith("Bringing .venv up to date")
    assert installed(venv) >= {"tiny_one", "tiny_two"}
    assert (venv / "kept").exists()


@pytest.mark.long
def test_package_that_cannot_be_installed_stops_the_setup(project: Project) -> None:
    for wheel in project.wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel, "a") as archive:
            archive.writestr("other.txt", "not what was pinned")
    done = project.install(f"PYTHON={sys.executable}")
    assert done.returncode == 2
    assert "HASHES" in done.stderr
    assert "Setting up .venv failed." in done.stderr
    assert not (project.folder / ".venv" / ".installed").exists()


def installed(venv: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in venv.glob("lib/python*/site-packages/*.dist-info")}
