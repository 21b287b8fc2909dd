"""A provider's own judgement of what goes into an attempt and of what comes out of it, beside our rules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from aijobs.ai.billing.tokens import estimate_tokens
from aijobs.ai.calling.gateway import AiGateway
from aijobs.ai.provider import Moderator
from aijobs.definitions.definition import PLATFORM_KEY
from aijobs.engine.calls import AttemptLedger, CallBooks
from aijobs.engine.run import Run
from aijobs.errors import JobError, ProvidersBusy, Retried, describe
from aijobs.logs import get_logger
from aijobs.screening.safety import texts_of

logger = get_logger(__name__)

MODERATED = frozenset(
    "harassment harassment/threatening hate hate/threatening illicit illicit/violent self-harm self-harm/intent "
    "self-harm/instructions sexual sexual/minors violence violence/graphic".split()
)
"""The categories that may be told of; any other word could be anything."""
AGAIN_AFTER_S = (0.5, 2.0, 8.0)
"""When an output's judgement is asked for again: the answer that it is about is paid for already."""
LONGEST_WAIT_S = 60.0
"""A moderation that wants more time than this is not waited for: the wait holds a worker's slot."""


class Moderation:
    """Asks where the operator has a provider that judges, and the job type asks for the check.

    Where it doesn't answer the attempt has failed: who asked for the check would believe it done. The platform's key
    pays for it, whoever pays for the answer.
    """

    def __init__(self, moderator: Moderator | None, gateway: AiGateway, books: CallBooks) -> None:
        self._moderator, self._gateway, self._books = moderator, gateway, books

    def is_wanted(self, run: Run) -> bool:
        """Whether anything of this attempt is judged by a provider."""
        return self._moderator is not None and run.definition.security.content_safety_check

    def check_input(self, run: Run, content: Mapping[str, Any]) -> None:
        """Let the input through, or raise `JobError` CONTENT_SAFETY_SELF_HARM or CONTENT_SAFETY_BLOCKED.

        Raises what the gateway raises too, `ProvidersBusy` among it: nothing is paid for yet.
        """
        if not self.is_wanted(run):
            return
        found = self._judge(run, _distinct(texts_of(content, identifiers=False)))
        _raise_for(run, found, "input", care="self-harm/intent" in found)

    def check_output(self, run: Run, output: Mapping[str, Any]) -> None:
        """Let the output through, or raise `JobError` CONTENT_SAFETY_BLOCKED.

        A judgement that fails is asked for again within the attempt, as the next attempt would buy another answer.
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
        """Where the moderation isn't to be asked now that is an error: a job that is put off instead would buy its
        answer again at each return, uncounted.
        """
        try:
            return self._judge(run, texts)
        except ProvidersBusy as busy:
            why = f"the moderation is not to be asked: {busy}"
            raise JobError("PROVIDER_UNAVAILABLE", why, retry_after=busy.wait) from busy

    def _judge(self, run: Run, texts: Sequence[str]) -> frozenset[str]:
        """The categories found; a call like any other, with its row."""
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
    """Seconds until a judgement is worth asking for again within this attempt; None where it isn't."""
    passes = error.code.startswith("PROVIDER_") and describe(error.code).retried is not Retried.NEVER
    if planned is None or not passes:
        return None
    wait = max(planned, error.retry_after.total_seconds() if error.retry_after else 0.0)
    return wait if wait <= LONGEST_WAIT_S and wait < remaining else None


def _raise_for(run: Run, categories: Collection[str], of: str, *, care: bool = False) -> None:
    """`JobError` as our rules would raise it, where anything was found: categories are OpenAI's names.

    `care`: it is the learner who speaks of hurting oneself.
    """
    if not categories:
        return
    named = sorted(category for category in categories if category in MODERATED) or ["other"]
    logger.info("safety.blocked", of=of, rules=[f"provider:{name}" for name in named], **run.fields())
    why = f"a provider's moderation finds in the {of}: {', '.join(named)}"
    raise JobError("CONTENT_SAFETY_SELF_HARM" if care else "CONTENT_SAFETY_BLOCKED", why)
