"""Job types of tests, loaded into processes as those of an installed package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def plug_in(folder: Path, name: str, modules: Mapping[str, str]) -> Path:
    """Write the metadata of a package with entry points for these job types into `folder`, and return the folder.

    A process with `folder` on its Python path loads the job types.
    """
    metadata = folder / f"{name.replace('-', '_')}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    lines = [f"{key} = {module}" for key, module in modules.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[aijobs.job_types]", *lines, ""]))
    return folder
