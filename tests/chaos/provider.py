"""The provider of a run: a server that answers each call by its job's script and keeps the bill.

It reads the note and the usage row of a call from the prompt; the consumer appends the latter.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from aijobs.testing.fakellm import Answer, Break, Call, FakeLlm, Step, faults
from aijobs.testing.fakellm.request import Request
from tests.chaos import chaos_job
from tests.chaos.plan import FLASHCARDS, Create
from tests.support.ports import free_port

NAME, MODEL = "flaky", "deepseek-flash"
OUTAGE = "outage"
LIMIT_S = 1.5
"""How long a worker waits for data if another route remains, so that hung calls end in time."""
QUIET_WITHIN_S = 15.0

STEPS: Mapping[str, Step] = {
    "good": Answer(),
    "slow": Answer(delta_chars=6, delta_s=0.06),
    "slower than a lease": Answer(delta_chars=4, delta_s=0.2),
    "slow cards": Answer(delta_chars=80, delta_s=0.1),
    "429": faults.too_many_requests(retry_after_s=0.3),
    "500": faults.server_error(),
    "503": faults.loading_model(),
    "reset": faults.reset(),
    "reset mid-body": faults.reset_mid_body(),
    "close after work": faults.close_after_work(),
    "cut stream": faults.cut_stream(),
    "blank": faults.blank(),
    "prose": faults.prose(),
    "truncated": faults.truncated(),
    "hang": faults.hang(),
    "stall": faults.stall(),
    "content filter": faults.content_filter(),
}
"""The steps of the server that a script can name."""
ANSWERS = frozenset(
    {"good", "slow", "slower than a lease", "slow cards", "blank", "prose", "truncated", "content filter"}
)
"""Steps that are a complete answer of a model, valid or not, and therefore certainly billed."""
GARBLED = "bad-request"
"""The server's name for a request that was cut off while it was sent."""

_NOTE = re.compile(r"\bnote (c\d+)\b")
_ROW = re.compile(r"\[call ([0-9a-f-]{36})\]\Z")


def with_row(prompt: str, usage_id: str) -> str:
    """Return the prompt with the id of its usage row appended."""
    return f"{prompt}\n\n[call {usage_id}]"


@dataclass(frozen=True)
class Billed:
    """One request in the server's log."""

    number: int
    usage_id: str | None
    """The usage row named in the prompt, if any."""
    note: str | None
    step: str
    status: int | None
    counted: Mapping[str, Any] | None = field(default=None)
    """The billed tokens; None if the server did no work."""
    whole: bool = False
    """The whole answer was sent."""
    left: bool = False
    at: datetime | None = None

    @property
    def request_id(self) -> str:
        """Return the request id in the server's answer."""
        return f"fake-{self.number}"

    @property
    def answered(self) -> bool:
        """Return whether a complete answer of a model was sent."""
        return self.whole and self.step in ANSWERS and self.status == 200


class Provider:
    """The server, a context manager. `stop` and `start` make it unavailable for a while."""

    def __init__(self, creates: Iterable[Create]) -> None:
        """`creates` are the jobs of the run, each with its script."""
        self._creates = {create.target_id: create for create in creates}
        self._asked: Counter[str] = Counter()
        self._guard = threading.Lock()
        self.is_out = False
        """If true, the server refuses each call with 503."""
        self._llm = FakeLlm(port=free_port(), on_request=self._answer)
        self._start_guard = threading.Lock()
        self._running = False

    def __enter__(self) -> Provider:
        self.start()
        self.url = self._llm.url
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server, if it doesn't run."""
        with self._start_guard:
            if not self._running:
                self._llm.start()
                self._running = True

    def stop(self) -> None:
        """Stop the server and cut open connections."""
        with self._start_guard:
            if self._running:
                self._running = False
                self._llm.stop()

    def bill(self) -> list[Billed]:
        """Wait until no call runs, and return all requests, without those that were cut off while they were sent."""
        self._llm.wait_until(
            lambda calls: all(call.ended for call in calls), QUIET_WITHIN_S, "the server has no running call"
        )
        return [_billed(call) for call in self._llm.log if call.step != GARBLED]

    def _answer(self, request: Request) -> Step:
        create = self._creates.get(_found(_NOTE, request) or "")
        if self.is_out:
            return replace(faults.loading_model(), name=OUTAGE)
        if create is None:
            return replace(faults.unknown_model(), name="nobody's note")
        with self._guard:
            number = self._asked[create.target_id]
            self._asked[create.target_id] += 1
        answers = create.script.answers
        return _step(answers[min(number, len(answers) - 1)], create)


def _step(name: str, create: Create) -> Step:
    """Return a step, with the answer's content if the fake server can't derive it from the prompt."""
    step = replace(STEPS[name], name=name)
    if create.job_type == FLASHCARDS:
        return step
    content = chaos_job.answer(create.input, {})
    if isinstance(step, Answer) and step.content is None:
        return replace(step, content=content)
    if isinstance(step, Break):
        return replace(step, then=replace(step.then, content=content))
    return step


def _found(pattern: re.Pattern[str], request: Request) -> str | None:
    found = pattern.search(request.text("user"))
    return found[1] if found else None


def _billed(call: Call) -> Billed:
    request = call.request
    return Billed(
        number=call.number,
        usage_id=_found(_ROW, request),
        note=_found(_NOTE, request),
        step=call.step,
        status=call.status,
        counted=call.usage,
        whole=call.whole,
        left=call.client_left,
        at=call.received_at,
    )
