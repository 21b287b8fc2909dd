"""`local-extractive-v1`: answers with JSON text like a model, and says only what the notes say."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aijobs.ai.billing.tokens import estimate_tokens
from aijobs.ai.provider import CallFacts, CallFailed, CancellationToken, GenerateAnswer, GenerateRequest
from aijobs.errors import JobError
from aijobs.forks import new_lock

if TYPE_CHECKING:
    from aijobs.learning.rules.reader import NotesReader

NAME = "local"
MODEL = "local-extractive-v1"
UNBILLED = CallFacts(billed="no")
"""Work in this process costs nothing, however it ends."""

Maker = Callable[["NotesReader", Mapping[str, Any], CancellationToken], dict[str, Any]]
"""Makes the answer's JSON object from a reader of notes and a job's input."""


def _make_flashcards(reader: NotesReader, job_input: Mapping[str, Any], token: CancellationToken) -> dict[str, Any]:
    from aijobs.learning.rules.flashcards import make_flashcards

    return make_flashcards(reader, job_input, token)


MAKERS: Mapping[str, Maker] = {"flashcard_generation": _make_flashcards}


class LocalProvider:
    """The provider `local`. `cache_dir` keeps the Chinese dictionary after the first read from the package.

    The dictionary takes about a second to load, so the first Chinese text loads it. The rules of both languages would
    slow each process's start, so the first job imports them.
    """

    name = NAME

    def __init__(self, cache_dir: Path, makers: Mapping[str, Maker] = MAKERS) -> None:
        self._cache_dir, self._makers = cache_dir, makers
        self._reader: NotesReader | None = None
        self._loading = new_lock()

    def _get_reader(self) -> NotesReader:
        """Return the only reader, which holds the dictionary."""
        from aijobs.learning.rules.chinese import ChineseRules
        from aijobs.learning.rules.reader import NotesReader

        with self._loading:
            if self._reader is None:
                self._reader = NotesReader(ChineseRules(self._cache_dir))
            return self._reader

    def generate(self, request: GenerateRequest, token: CancellationToken) -> GenerateAnswer:
        """Return the answer to `request`, from its `input` alone; the same for the same input.

        Raises `CallFailed`, never billed: INTERNAL_CONFIG for a job type without rules, VALIDATION_NOTHING_TO_EXTRACT
        if they find nothing, INTERNAL_ERROR for their own faults; and between two segments the token's errors.
        """
        try:
            text = self._write(request, token)
        except JobError as error:
            raise CallFailed(error.code, error.internal, UNBILLED) from error
        except Exception as error:
            raise CallFailed("INTERNAL_ERROR", "the rules failed", UNBILLED) from error
        return GenerateAnswer(
            text=text,
            provider=NAME,
            model=MODEL,
            prompt_tokens=estimate_tokens(request.prompt.system) + estimate_tokens(request.prompt.user),
            completion_tokens=estimate_tokens(text),
            cached_tokens=0,
            estimated=True,
            finish_reason="stop",
        )

    def _write(self, request: GenerateRequest, token: CancellationToken) -> str:
        maker = self._makers.get(request.job_type)
        if maker is None:
            raise JobError("INTERNAL_CONFIG", f"the local provider has no rules for {request.job_type}")
        token.raise_if_cancelled()
        return json.dumps(maker(self._get_reader(), request.input, token), ensure_ascii=False, allow_nan=False)
