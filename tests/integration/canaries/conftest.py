"""What a worker has that has servers to ask."""

from __future__ import annotations

import pytest

from aijobs.ai.providers.openai_compatible import load_client


@pytest.fixture(scope="session", autouse=True)
def _loaded_client() -> None:
    """No test's time begins before the client is loaded."""
    load_client()
