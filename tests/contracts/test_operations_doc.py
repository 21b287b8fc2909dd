"""The operations page explains every warning that the product logs, and no other."""

from __future__ import annotations

import re

from aijobs.web.api.schemas import SCHEMAS
from tests.contracts import documents
from tests.contracts.sources import modules

PAGE = "docs/operations.md"


def log_table() -> str:
    return documents.read(PAGE).partition("## Log lines")[2].partition("\n## ")[0]


def logged_events() -> set[str]:
    """Return the events that the product logs as a warning or an error, and those of its outages."""
    source = "\n".join(module.source for module in modules())
    logged = set(re.findall(r'logger\.(?:warning|error)\(\s*"([a-z_.]+)"', source))
    return logged | {f"{what}.away" for what in re.findall(r'Outage\(logger, "([a-z_.]+)"\)', source)}


def test_every_warning_and_error_is_explained_to_operators() -> None:
    explained = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", log_table()))
    assert logged_events() <= explained


def test_every_explained_line_is_logged() -> None:
    source = "\n".join(module.source for module in modules())
    cells = {name for row in documents.rows(log_table()) for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", row[0])}
    ends = {f"job.{word}" for word in ("succeeded", "failed", "cancelled", "retry_scheduled")}
    assert not [name for name in cells - logged_events() - ends if f'"{name}"' not in source]


def test_every_metric_of_an_alert_is_in_the_api() -> None:
    answered = set(SCHEMAS["QueueStatus"]["properties"]) | set(SCHEMAS["OutboxStatus"]["properties"])
    rows = documents.rows(documents.read(PAGE).partition("### Alert rules")[2].partition("\n## ")[0])
    named = {name for row in rows for name in re.findall(r"(?:queues'|outbox's) `(\w+)`", row[1])}
    assert len(named) >= 4
    assert named <= answered
