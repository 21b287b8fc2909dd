"""Rules that compare usage rows with the workers' ledger and with the provider's bill.

Each rule yields the broken promises with their jobs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from aijobs.ai.models import AiUsageLog, CallState
from tests.chaos.broken import Broken
from tests.chaos.evidence import Evidence
from tests.chaos.provider import NAME, Billed


def judge_accounts(evidence: Evidence) -> Iterator[Broken]:
    """Yield every difference between usage rows, ledger and bill."""
    yield from _ledger_against_rows(evidence)
    yield from _bill_against_rows(evidence)
    yield from _rows_against_bill(evidence)
    yield from _bought_once(evidence)


def _ledger_against_rows(evidence: Evidence) -> Iterator[Broken]:
    rows = evidence.rows
    for call in evidence.calls.values():
        row = rows.get(call.usage_id)
        if row is None or (row.job_id, row.attempt_no) != (call.job_id, call.attempt_no):
            yield Broken("has a provider call without its usage row", (call.job_id,))
        if call.asked != 1 or call.answered > 1:
            yield Broken(f"has {call.asked} calls on one usage row", (call.job_id,))
    for row in rows.values():
        call_or_none = evidence.calls.get(row.id)
        if row.state == CallState.STARTED:
            yield Broken("has a usage row that was never closed", (row.job_id,))
        if row.state == CallState.DONE and (call_or_none is None or not call_or_none.answered):
            yield Broken("has a usage row that is done without an answer", (row.job_id,))
        if call_or_none is None and row.state not in (CallState.LOST, "failed"):
            yield Broken(f"has a usage row that is {row.state} and no call", (row.job_id,))


def _bill_against_rows(evidence: Evidence) -> Iterator[Broken]:
    """Check that each request on the bill belongs to one usage row, and to that job's notes."""
    rows = evidence.rows
    for usage_id, times in Counter(billed.usage_id for billed in evidence.bill).items():
        row = rows.get(usage_id or "")
        if row is None:
            yield Broken(f"{times} requests reached the server and have no usage row: {usage_id}")
        elif times > 1:
            yield Broken(f"{times} requests went out under one usage row", (row.job_id,))
    for billed in evidence.bill:
        row = rows.get(billed.usage_id or "")
        if row is None:
            continue
        job = evidence.jobs[row.job_id]
        if row.provider != NAME or job.target_id != billed.note:
            yield Broken(f"sent notes of {billed.note} under a row for {job.target_id} at {row.provider}", (job.id,))
        if billed.at is not None and billed.at < row.started_at:
            yield Broken(f"sent {billed.request_id} before its usage row was there", (job.id,))


def _rows_against_bill(evidence: Evidence) -> Iterator[Broken]:
    """Check that what a row says about a call agrees with the bill. A row may say less."""
    by_row = {billed.usage_id: billed for billed in evidence.bill}
    for row in evidence.rows.values():
        if row.provider == NAME:
            for what in _differences(row, by_row.get(row.id)):
                yield Broken(what, (row.job_id,))


def _differences(row: AiUsageLog, billed: Billed | None) -> Iterator[str]:
    if row.request_id is not None and (billed is None or row.request_id != billed.request_id):
        yield f"names request {row.request_id}, and the server calls it {billed and billed.request_id}"
    if row.http_status is not None and (billed is None or row.http_status != billed.status):
        yield f"was answered {row.http_status}, and the server says {billed and billed.status}"
    if row.billed == "no" and billed is not None and billed.counted is not None:
        yield f"says that {billed.request_id} ({billed.step}) cost nothing, and the server did the work"
    if row.billed != "yes":
        return
    if billed is None or not billed.answered:
        yield f"says that a call is billed, and the server gave no answer: {billed and billed.step}"
    elif billed.counted is not None and not row.estimated:
        counted = billed.counted["prompt_tokens"], billed.counted["completion_tokens"]
        if (row.prompt_tokens, row.completion_tokens) != counted:
            yield f"counts {row.prompt_tokens} and {row.completion_tokens} tokens, and the server {counted}"
        if row.cost_micros is None:
            yield f"has no price for {billed.request_id}, whose tokens are known"


def _bought_once(evidence: Evidence) -> Iterator[Broken]:
    """Check on the bill that no attempt called the server after an answer was saved."""
    rows, asked = evidence.rows, defaultdict(list)
    for billed in evidence.bill:
        if row := rows.get(billed.usage_id or ""):
            asked[row.job_id].append(row.attempt_no)
    for job_id, attempts in asked.items():
        saved = [event.attempt_no for event in evidence.history[job_id] if event.type == "output_saved"]
        if saved and max(attempts) > min(saved):
            yield Broken(f"saved its answer at attempt {min(saved)} and asked the server again: {attempts}", (job_id,))
