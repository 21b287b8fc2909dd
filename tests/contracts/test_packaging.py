"""An installation: a wheel with all files that the code reads, and packages pinned as declared."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.processes import clean_environment

ROOT = Path(__file__).parents[2]
MOVED = ("templates", "static", "migrations")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> set[str]:
    """The names of the files in the wheel."""
    with zipfile.ZipFile(wheel_file) as archive:
        return set(archive.namelist())


def committed(*folders: str) -> list[str]:
    """Return committed files under `folders`, without the sources of translations."""
    listing = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listing.stdout.split("\0") if name and (ROOT / name).exists()]
    return [name for name in names if not name.endswith((".po", ".pot"))]


def pins() -> dict[str, list[str]]:
    """Return pinned versions by package name (more than one if they depend on the Python version)."""
    found: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([a-z0-9._-]+)==([^\s;]+)", LOCK, flags=re.MULTILINE):
        found.setdefault(canonicalize_name(name), []).append(version)
    return found


def test_wheel_contains_every_committed_file_that_the_code_reads(wheel: set[str]) -> None:
    expected = set(committed("aijobs")) | {f"aijobs/{name}" for name in committed(*MOVED)}
    assert len(expected) > 30
    assert expected <= wheel


def test_wheel_contains_nothing_of_an_instance_or_of_the_tests(wheel: set[str]) -> None:
    assert {name.split("/", maxsplit=1)[0] for name in wheel} == {
        "aijobs",
        f"aijobs-{SETTINGS['project']['version']}.dist-info",
    }
    assert not [name for name in wheel if name.endswith((".db", ".pyc", ".po"))]


def test_installed_wheel_names_no_makefile_and_says_where_its_files_are(wheel_file: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel_file) as archive:
        archive.extractall(tmp_path / "installed")
    code = (
        "from aijobs.settings import Settings\n"
        "from aijobs.cli import run\n"
        "from aijobs.cli.serving import Served\n"
        "print(Settings().instance_path); print(Served('', print, stays=False).console()); run(['--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment({"PYTHONPATH": str(tmp_path / "installed")}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    where, console, *text = done.stdout.splitlines()
    assert where == f"{sys.prefix}/var/aijobs-instance"
    assert console == "/console/ at the address that `aijobs up` prints"
    assert "var/aijobs-instance/" in " ".join(text)


def test_every_declared_package_is_pinned_within_its_bounds() -> None:
    project = SETTINGS["project"]
    declared = [*project["dependencies"], *SETTINGS["build-system"]["requires"]]
    for extra in project["optional-dependencies"].values():
        declared += extra
    pinned = pins()
    for requirement in map(Requirement, declared):
        if requirement.name == project["name"]:
            continue
        versions = pinned.get(canonicalize_name(requirement.name), [])
        assert versions, f"{requirement} is not in requirements.lock: make lock"
        for version in versions:
            assert requirement.specifier.contains(version), f"{requirement} is pinned to {version}: make lock"


def test_every_pinned_package_has_hashes_and_no_address() -> None:
    packages = re.sub(r"^#.*\n", "", LOCK, flags=re.MULTILINE)
    for entry in filter(None, re.split(r"^(?=[a-z0-9])", packages, flags=re.MULTILINE)):
        assert "--hash=sha256:" in entry, entry
    assert "://" not in LOCK
    assert not re.search(r"^\s*--(index|extra|find|trusted)", LOCK, flags=re.MULTILINE)
