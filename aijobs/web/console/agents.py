"""Describe a browser by its user agent: `Firefox on Windows`."""

from __future__ import annotations

import re

from flask_babel import gettext

_BROWSERS = (
    # Each browser also names others for compatibility, so the special ones come first.
    ("Edge", re.compile(r"\b(Edg|EdgA|EdgiOS|Edge)/")),
    ("Opera", re.compile(r"\b(OPR|Opera|OPiOS)/")),
    ("Samsung Internet", re.compile(r"\bSamsungBrowser/")),
    ("Firefox", re.compile(r"\b(Firefox|FxiOS)/")),
    ("Chrome", re.compile(r"\b(Headless)?(Chrome|Chromium|CriOS)/")),
    ("Safari", re.compile(r"\bVersion/[\d.]+ .*Safari/")),
)
_SYSTEMS = (
    ("iPhone", re.compile(r"\biPhone\b")),
    ("iPad", re.compile(r"\biPad\b")),
    ("Android", re.compile(r"\bAndroid\b")),
    ("Windows", re.compile(r"\bWindows\b")),
    ("macOS", re.compile(r"\bMac OS X\b|\bMacintosh\b")),
    ("ChromeOS", re.compile(r"\bCrOS\b")),
    ("Linux", re.compile(r"\bLinux\b")),
)
_PRODUCT = re.compile(r"([A-Za-z][\w.-]{0,39})(/|$)")


def agent_words(agent: str | None) -> str:
    """Return browser and system in the current language; for a program (`curl/8.5`) its name."""
    text = agent or ""
    browser = next((name for name, pattern in _BROWSERS if pattern.search(text)), None)
    system = next((name for name, pattern in _SYSTEMS if pattern.search(text)), None)
    if browser and system:
        return gettext("%(browser)s on %(system)s", browser=browser, system=system)
    program = _PRODUCT.match(text)
    return browser or (program[1] if program and program[1] != "Mozilla" else gettext("Unknown browser"))
