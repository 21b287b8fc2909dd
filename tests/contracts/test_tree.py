"""The files of the repository, and texts that none of them may contain."""

from __future__ import annotations

import re
import subprocess
from functools import cache

from tests.contracts.sources import ROOT

FOLDERS = {"aijobs", "templates", "static", "tests", "instance", "migrations", "docs", "bench", "deploy"}
FILES = {
    *("app.py", "pyproject.toml", "requirements.lock", "Makefile", "babel.cfg"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE"),
}
LISTS_OF_PACKAGES = ("py" + "pi.org", "python" + "hosted", "npm" + "js", "crates" + ".io", "proxy.golang" + ".org")
PLACES_OF_WORK = (r"(?<![\w.-])/" + r"work/", r"(?<![\w.-])/" + r"root/", r"/tmp/" + r"brief", r"\." + r"library/")


@cache
def tracked() -> tuple[str, ...]:
    """Return the files that git tracks and that exist."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(name for name in listing.split("\0") if name and (ROOT / name).is_file())


def lines_with(patterns: tuple[str, ...]) -> list[str]:
    """Return `file:line` of each line of a tracked text that matches one of the patterns."""
    wanted = re.compile("|".join(patterns), re.IGNORECASE)
    found = []
    for name in tracked():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name}:{n}" for n, line in enumerate(text.splitlines(), 1) if wanted.search(line)]
    return found


def test_top_level_has_only_the_listed_files_and_folders() -> None:
    top = {name.split("/", 1)[0] for name in tracked()}
    assert {name for name in top if not name.startswith(".")} <= FOLDERS | FILES
    assert {name for name in tracked() if name.startswith("instance/")} == {"instance/.gitkeep"}


def test_no_file_names_a_package_index() -> None:
    assert not lines_with(tuple(re.escape(host) for host in LISTS_OF_PACKAGES))


def test_no_file_names_a_folder_of_its_authors() -> None:
    assert not lines_with(PLACES_OF_WORK)


def test_no_file_contains_a_private_key_or_a_token() -> None:
    begins = "-----BEGIN [A-Z ]*PRIVATE" + " KEY-----"
    assert not lines_with((begins, r"\bsk-[A-Za-z0-9]{20,}", r"\bgh[pousr]_[A-Za-z0-9]{30,}", r"\bAKIA[0-9A-Z]{16}\b"))


def test_no_file_marks_unfinished_work() -> None:
    """Unfinished work belongs into an issue, where somebody sees it."""
    marks = r"(?-i:\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b)"
    ours = ("aijobs/", "tests/", "templates/", "migrations/", "docs/", "app.py", "Makefile")
    assert not [line for line in lines_with((marks,)) if line.startswith(ours)]
