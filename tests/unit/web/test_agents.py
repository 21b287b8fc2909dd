"""User agents as names of browsers and systems."""

from __future__ import annotations

import pytest
from flask import Flask
from flask_babel import Babel

from aijobs.web.console.agents import agent_words

MAC = "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/"
WINDOWS = (
    "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/141.0.0.0 Safari/537.36"
)
ANDROID = "Mozilla/5.0 (Linux; Android 10; K) AppleWebKit/537.36 (KHTML, like Gecko)"


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        (WINDOWS, "Chrome on Windows"),
        (f"{WINDOWS} Edg/141.0.0.0", "Edge on Windows"),
        (f"{WINDOWS} OPR/125.0.0.0", "Opera on Windows"),
        ("Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0", "Firefox on Linux"),
        (f"{MAC}605.1.15 (KHTML, like Gecko) Version/26.0 Safari/605.1.15", "Safari on macOS"),
        (f"{MAC}537.36 (KHTML, like Gecko) HeadlessChrome/141.0.0.0 Safari/537.36", "Chrome on macOS"),
        (f"{ANDROID} Chrome/141.0.0.0 Mobile Safari/537.36", "Chrome on Android"),
        (f"{ANDROID} SamsungBrowser/28.0 Chrome/130.0.0.0 Mobile Safari/537.36", "Samsung Internet on Android"),
        (
            "Mozilla/5.0 (iPad; CPU OS 18_5 like Mac OS X) AppleWebKit/605 (KHTML) FxiOS/140.0 Safari/605",
            "Firefox on iPad",
        ),
        (
            "Mozilla/5.0 (X11; CrOS x86_64 14541.0.0) AppleWebKit/537.36 Chrome/141.0.0.0 Safari/537.36",
            "Chrome on ChromeOS",
        ),
        ("curl/8.5.0", "curl"),
        ("python-requests/2.32", "python-requests"),
        ("Mozilla/5.0", "Unknown browser"),
        ("", "Unknown browser"),
        (None, "Unknown browser"),
    ],
)
def test_browser_is_named_with_its_system(agent: str | None, words: str) -> None:
    app = Flask(__name__)
    Babel(app)
    with app.test_request_context():
        assert agent_words(agent) == words
