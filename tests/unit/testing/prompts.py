"""Requests with the prompts that aijobs sends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aijobs.ai.prompts import PromptTemplates
from aijobs.job_types.flashcard_generation import DEFINITION, SAMPLE_INPUT, Input, Output
from aijobs.learning.models import FLASHCARD_GENERATION
from aijobs.settings import PACKAGE

_PROMPTS = PromptTemplates([PACKAGE / "job_types" / "prompts"])


def flashcard_input(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the sample input of the job type with `changes`, as in a snapshot."""
    return Input.model_validate({**SAMPLE_INPUT, **(changes or {})}).model_dump(mode="json")


def flashcard_request(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a chat completion request for flashcards with the newest prompt."""
    assert DEFINITION.prompt is not None
    prompt = _PROMPTS.render(
        FLASHCARD_GENERATION,
        DEFINITION.prompt.version,
        {"input": flashcard_input(changes), "output_schema": json.dumps(Output.model_json_schema())},
    )
    return {
        "model": "dev-1",
        "messages": [{"role": "system", "content": prompt.system}, {"role": "user", "content": prompt.user}],
        "response_format": {"type": "json_object"},
    }
