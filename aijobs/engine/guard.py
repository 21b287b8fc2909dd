"""What an attempt may work on and what may leave it: content safety and redaction, where the job type asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aijobs.engine.run import Run
from aijobs.errors import JobError
from aijobs.logs import get_logger
from aijobs.screening.redaction import redact
from aijobs.screening.rule_pack import BLOCK
from aijobs.screening.safety import ALLOW, ContentSafety, Verdict, texts_of

logger = get_logger(__name__)


class Guard:
    """Stands before and behind the work of an attempt. The log and the errors name rules, and never what they found."""

    def __init__(self, safety: Callable[[], ContentSafety]) -> None:
        """`safety` returns the rules. The first job that needs them calls it: reading them takes long."""
        self._safety = safety

    def check_input(self, run: Run, content: Mapping[str, Any]) -> None:
        """Let the input through, or raise `JobError` CONTENT_SAFETY_SELF_HARM or CONTENT_SAFETY_BLOCKED.

        Call it before any provider is called. The app's own ids are not checked.
        """
        if not run.definition.security.content_safety_check:
            return
        verdict = self._safety().check(texts_of(content, identifiers=False))
        self._note(run, verdict, "input")
        if verdict.is_self_harm:
            raise JobError("CONTENT_SAFETY_SELF_HARM", _why(verdict, "input"))
        if verdict.action == BLOCK:
            raise JobError("CONTENT_SAFETY_BLOCKED", _why(verdict, "input"))

    def check_output(self, run: Run, output: Mapping[str, Any]) -> None:
        """Let the output through, or raise `JobError` CONTENT_SAFETY_BLOCKED.

        Self-harm in an output is the model's text, not the learner's: it is blocked like the rest.
        """
        if not run.definition.security.content_safety_check:
            return
        verdict = self._safety().check(texts_of(output, identifiers=True))
        self._note(run, verdict, "output")
        if verdict.action == BLOCK:
            raise JobError("CONTENT_SAFETY_BLOCKED", _why(verdict, "output"))

    def redact_output(self, run: Run, output: dict[str, Any]) -> dict[str, Any]:
        """Return the output as it may be saved."""
        if not run.definition.security.output_redaction:
            return output
        redacted: dict[str, Any] = redact(output).content
        return redacted

    def _note(self, run: Run, verdict: Verdict, of: str) -> None:
        if verdict.action == ALLOW:
            return
        event = "safety.blocked" if verdict.action == BLOCK else "safety.flagged"
        logger.info(event, of=of, rules=list(verdict.rules), hits=sum(verdict.counts.values()), **run.fields())


def _why(verdict: Verdict, of: str) -> str:
    return f"the {of} meets safety rules: {', '.join(verdict.rules)}"
