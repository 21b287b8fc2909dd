"""A provider's moderation of an attempt's input and output, beside our own rules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from aijobs.ai.billing.tokens import estimate_tokens
from aijobs.ai.calling.gateway import AiGateway
from aijobs.ai.errors import ProvidersBusy
from aijobs.ai.provider import Moderator
from aijobs.definitions.definition import PLATFORM_KEY
from aijobs.engine.calls import AttemptLedger, CallBooks
from aijobs.engine.run import Run
from aijobs.errors import JobError, Retried, describe
from aijobs.logs import get_logger
from aijobs.screening.safety import texts_of

logger = get_logger(__name__)

MODERATED = frozenset(
    "harassment harassment/threatening hate hate/threatening illicit illicit/violent self-harm self-harm/intent "
    "self-harm/instructions sexual sexual/minors violence violence/graphic".split()
)
"""The categories that may be named in logs and errors. Any other word is named `other`."""
AGAIN_AFTER_S = (0.5, 2.0, 8.0)
"""Seconds before each repeat of an output's moderation: its answer is paid for already."""
LONGEST_WAIT_S = 60.0
"""The longest wait for a moderation: it holds a worker's slot."""


class Moderation:
    """Calls the operator's moderation provider, if there is one and the job type asks for the check.

    If it doesn't answer, the attempt fails: content must not pass unchecked. The platform's key always pays for it.
    """

    def __init__(self, moderator: Moderator | None, gateway: AiGateway, books: CallBooks) -> None:
        self._moderator, self._gateway, self._books = moderator, gateway, books

    def is_wanted(self, run: Run) -> bool:
        """Return whether a provider judges this attempt."""
        return self._moderator is not None and run.definition.security.content_safety_check

    def check_input(self, run: Run, content: Mapping[str, Any]) -> None:
        """Let the input through, or raise `JobError` CONTENT_SAFETY_SELF_HARM or CONTENT_SAFETY_BLOCKED.

        Also raises the gateway's errors and `ProvidersBusy`: nothing is paid for yet.
        """
        if not self.is_wanted(run):
            return
        found = self._judge(run, _distinct(texts_of(content, identifiers=False)))
        _raise_for(run, found, "input", care="self-harm/intent" in found)

    def check_output(self, run: Run, output: Mapping[str, Any]) -> None:
        """Let the output through, or raise `JobError` CONTENT_SAFETY_BLOCKED.

        A moderation that fails is repeated within the attempt, because the next attempt would buy another answer.
        """
        if not self.is_wanted(run):
            return
        found = self._insist(run, _distinct(texts_of(output, identifiers=True)))
        _raise_for(run, found, "output")

    def _insist(self, run: Run, texts: Sequence[str]) -> frozenset[str]:
        waits = iter(AGAIN_AFTER_S)
        while True:
            try:
                return self._judge_or_fail(run, texts)
            except JobError as error:
                wait = _wait_after(error, next(waits, None), run.token.remaining())
                if wait is None:
                    raise
            logger.info("moderation.again", waitMs=round(wait * 1000), **run.fields())
            run.token.sleep(wait)

    def _judge_or_fail(self, run: Run, texts: Sequence[str]) -> frozenset[str]:
        """Convert an unavailable moderation to an error: a postponed job would buy its answer again in each attempt."""
        try:
            return self._judge(run, texts)
        except ProvidersBusy as busy:
            why = f"the moderation is unavailable: {busy}"
            raise JobError("PROVIDER_UNAVAILABLE", why, retry_after=busy.wait) from busy

    def _judge(self, run: Run, texts: Sequence[str]) -> frozenset[str]:
        """Return the categories found. It is a call like any other, with a usage row."""
        if self._moderator is None or not texts:
            return frozenset()
        tokens = sum(estimate_tokens(text) for text in texts)
        ledger = AttemptLedger(self._books, run, tokens, PLATFORM_KEY)
        found = self._gateway.judge(self._moderator, texts, run.token, ledger)
        ledger.judged()
        return found


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(text for text in texts if text.strip()))


def _wait_after(error: JobError, planned: float | None, remaining: float) -> float | None:
    """Return the seconds until a moderation is worth repeating in this attempt; None if it isn't."""
    passes = error.code.startswith("PROVIDER_") and describe(error.code).retried is not Retried.NEVER
    if planned is None or not passes:
        return None
    wait = max(planned, error.retry_after.total_seconds() if error.retry_after else 0.0)
    return wait if wait <= LONGEST_WAIT_S and wait < remaining else None


def _raise_for(run: Run, categories: Collection[str], of: str, *, care: bool = False) -> None:
    """Raise `JobError` as our own rules do if anything was found. Categories are OpenAI's names.

    `care`: the learner speaks of self-harm.
    """
    if not categories:
        return
    named = sorted(category for category in categories if category in MODERATED) or ["other"]
    logger.info("safety.blocked", of=of, rules=[f"provider:{name}" for name in named], **run.fields())
    why = f"a provider's moderation finds in the {of}: {', '.join(named)}"
    raise JobError("CONTENT_SAFETY_SELF_HARM" if care else "CONTENT_SAFETY_BLOCKED", why)
