"""OpenAI's moderations: a text with a flagged word is flagged in its category, nothing else is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aijobs.testing.fakellm.answer import JSON, Step, encode
from aijobs.testing.fakellm.exchange import Exchange

CATEGORIES = (
    *("harassment", "harassment/threatening", "hate", "hate/threatening", "illicit", "illicit/violent"),
    *("self-harm", "self-harm/intent", "self-harm/instructions", "sexual", "sexual/minors"),
    *("violence", "violence/graphic"),
)


@dataclass(frozen=True)
class Moderate(Step):
    """A verdict on each input. `flags`: words in lower case, and their category."""

    flags: Mapping[str, str] = field(default_factory=dict)
    name: str = field(default="moderation", kw_only=True)

    def play(self, exchange: Exchange) -> None:
        """Answer the call."""
        asked = exchange.request.body["input"]
        texts = [asked] if isinstance(asked, str) else [_text(part) for part in asked]
        answer = {
            "id": f"modr-{exchange.number}",
            "model": exchange.request.model or "omni-moderation-latest",
            "results": [self._judge(text.lower()) for text in texts],
        }
        exchange.body(200, JSON, encode(answer))

    def _judge(self, text: str) -> dict[str, Any]:
        hit = {category for words, category in self.flags.items() if words in text}
        categories = {category: category in hit for category in (*CATEGORIES, *sorted(hit - set(CATEGORIES)))}
        scores = {category: 0.98 if found else 0.0001 for category, found in categories.items()}
        return {"flagged": bool(hit), "categories": categories, "category_scores": scores}


def _text(part: Any) -> str:
    return str(part.get("text", "")) if isinstance(part, Mapping) else str(part)
