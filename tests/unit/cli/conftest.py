"""Fixtures: the command line in this process, on its own instance."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aijobs import cli
from aijobs.cli.opening import open_services
from aijobs.wiring.services import Services

Aijobs = Callable[..., tuple[int, str, str]]


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "instance"
    monkeypatch.setenv("AIJOBS_INSTANCE_PATH", str(path))
    return path


@pytest.fixture
def aijobs(instance: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Aijobs:
    """`aijobs("db", "upgrade") -> (exit code, stdout, stderr)`, in this process, without a change to its logging."""
    monkeypatch.setattr(logging.getLogger(), "handlers", list(logging.getLogger().handlers))

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(list(arguments))
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def upgraded(aijobs: Aijobs) -> Aijobs:
    assert aijobs("db", "upgrade")[0] == 0
    return aijobs


@pytest.fixture
def services(upgraded: Aijobs) -> Iterator[Services]:
    """The services of the commands, on the same instance."""
    with open_services() as opened:
        yield opened
