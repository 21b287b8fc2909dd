"""The operations page explains every warning that the product logs, and names nothing that isn't there."""

from __future__ import annotations

import re

from aijobs.web.api.schemas import SCHEMAS
from tests.contracts import documents
from tests.contracts.sources import modules

PAGE = "docs/operations.md"


def log_table() -> str:
    return documents.read(PAGE).partition("## Log lines")[2].partition("\n## ")[0]


def told_events() -> set[str]:
    """The events that the product logs as a warning or an error, and those of its outages."""
    source = "\n".join(module.source for module in modules())
    told = set(re.findall(r'logger\.(?:warning|error)\(\s*"([a-z_.]+)"', source))
    return told | {f"{what}.away" for what in re.findall(r'Outage\(logger, "([a-z_.]+)"\)', source)}


def test_every_warning_and_error_is_explained_to_operators() -> None:
    explained = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", log_table()))
    assert told_events() <= explained


def test_every_line_that_is_explained_is_one() -> None:
    source = "\n".join(module.source for module in modules())
    cells = {name for row in documents.rows(log_table()) for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", row[0])}
    ends = {f"job.{word}" for word in ("succeeded", "failed", "cancelled", "retry_scheduled")}
    assert not [name for name in cells - told_events() - ends if f'"{name}"' not in source]


def test_every_number_that_an_alert_is_made_from_is_answered() -> None:
    answered = set(SCHEMAS["QueueStatus"]["properties"]) | set(SCHEMAS["OutboxStatus"]["properties"])
    rows = documents.rows(documents.read(PAGE).partition("### Alert rules")[2].partition("\n## ")[0])
    named = {name for row in rows for name in re.findall(r"(?:queues'|outbox's) `(\w+)`", row[1])}
    assert len(named) >= 4
    assert named <= answered
