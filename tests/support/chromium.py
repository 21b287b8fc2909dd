"""The path of Chromium and its command-line arguments."""

from __future__ import annotations

import shutil
from pathlib import Path

from playwright.sync_api import Playwright

from tests.support.servers import ServerMissing

_NAMES = ("chromium", "chromium-browser", "google-chrome")

# Without `--disable-background-networking`, Chromium connects to its maker's hosts at every start.
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find_chromium(playwright: Playwright) -> str:
    """Return the path of the system's Chromium, otherwise of Playwright's own. Raises ServerMissing."""
    for name in _NAMES:
        path = shutil.which(name)
        if path:
            return path
    own = playwright.chromium.executable_path
    if Path(own).exists():
        return own
    raise ServerMissing("no Chromium: install the system's package chromium")
