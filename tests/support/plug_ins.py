"""Job types of tests, brought into processes as an installed package would bring them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def plug_in(folder: Path, name: str, modules: Mapping[str, str]) -> Path:
    """Fill `folder` with what a package of this name would bring: the entry points of its job types.

    On the path of a process it makes them known there.
    """
    metadata = folder / f"{name.replace('-', '_')}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    lines = [f"{key} = {module}" for key, module in modules.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[aijobs.job_types]", *lines, ""]))
    return folder
