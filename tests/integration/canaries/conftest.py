"""A fixture that loads the provider client, as a worker does."""

from __future__ import annotations

import pytest

from aijobs.ai.providers.openai_compatible import load_client


@pytest.fixture(scope="session", autouse=True)
def _loaded_client() -> None:
    """Load the client before the first test, so that it doesn't count in that test's time."""
    load_client()
