"""Good answers: flashcards from the notes in the prompt, by the rules of the built-in provider."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from aijobs.errors import JobError
from aijobs.learning.grounding import script_of
from aijobs.learning.rules.chinese import ChineseRules
from aijobs.learning.rules.flashcards import make_flashcards
from aijobs.learning.rules.reader import NotesReader
from aijobs.testing.fakellm.request import Request

_FENCED = re.compile(r"<<<(?P<mark>data-[0-9a-f]+)\n(?P<inside>.*)\n(?P=mark)>>>", re.DOTALL)
_SEGMENT = re.compile(r"\n\n\[(?P<sid>[^\]\s]{1,64})\]\n")
_AT_MOST = re.compile(r"at most (\d{1,3})\b")
_TYPES = re.compile(r"of these types: ([a-z, ]+)")
_ENOUGH = 20


class _Unhurried:
    """A token for work that isn't cancelled."""

    def raise_if_cancelled(self) -> None:
        return None

    def remaining(self) -> float:
        return 3600.0

    def progress(self, percent: int) -> None:
        return None

    def on_cancel(self, callback: Callable[[], object]) -> None:
        return None

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class GoodWriter:
    """Makes the content of good answers; equal requests get equal ones. `cache_dir` keeps the Chinese dictionary."""

    def __init__(self, cache_dir: Path) -> None:
        self._reader = NotesReader(ChineseRules(cache_dir))
        self._from_prompt = lru_cache(maxsize=512)(self._write)

    def write(self, request: Request) -> str:
        """Return JSON text: flashcards if notes and their schema are in the prompt, otherwise the smallest value of the
        request's (or the prompt's) schema, otherwise `{}`; a friendly line if no JSON was requested.
        """
        schema = json.dumps(request.schema) if request.schema is not None else ""
        return self._from_prompt(request.text("system", "developer"), request.text("user"), schema, request.format)

    def _write(self, system: str, user: str, schema_text: str, answer_format: str) -> str:
        schema = json.loads(schema_text) if schema_text else find_schema(system + "\n" + user)
        notes = read_notes(user)
        if notes is not None and "cards" in (schema or {}).get("properties", {}):
            return json.dumps(self._cards(notes), ensure_ascii=False)
        if schema is None and answer_format == "text":
            return "Hello from the pretend model."
        return json.dumps(smallest(schema) if schema else {}, ensure_ascii=False)

    def _cards(self, notes: Mapping[str, Any]) -> dict[str, Any]:
        try:
            answer = make_flashcards(self._reader, notes, _Unhurried())
        except JobError:
            return {"cards": []}  # a model's answer to notes that hold nothing
        for card in answer["cards"]:
            # A model counts no characters.
            card["evidence"] = [{"sid": one["sid"], "quote": one["quote"]} for one in card["evidence"]]
        return answer


def read_notes(prompt: str) -> dict[str, Any] | None:
    """Return the notes between the fence marks of a prompt, with their options; None if there are none."""
    fenced = _FENCED.search(prompt)
    if fenced is None:
        return None
    _, *parts = _SEGMENT.split(fenced["inside"].rstrip("\n"))
    segments = [{"sid": sid, "text": text} for sid, text in zip(parts[::2], parts[1::2], strict=True)]
    asked = prompt[: fenced.start()]
    most, types = _AT_MOST.search(asked), _TYPES.search(asked)
    lang = "zh" if "Chinese" in asked else "en" if "English" in asked else script_of(fenced["inside"]) or "en"
    options = {
        "max_cards": int(most[1]) if most else _ENOUGH,
        "card_types": types[1].replace(" ", "").split(",") if types else ["basic", "cloze"],
    }
    return {"lang": lang, "segments": segments, "options": options}


def find_schema(prompt: str) -> dict[str, Any] | None:
    """Return the first JSON Schema of an object in a prompt."""
    decoder = json.JSONDecoder()
    for start in _braces(prompt):
        try:
            value, _ = decoder.raw_decode(prompt, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get("properties"), dict):
            return value
    return None


def _braces(text: str) -> Iterator[int]:
    """Yield the places of lines that begin with a brace."""
    return (match.end() - 1 for match in re.finditer(r"^\s*\{", text, re.MULTILINE))


def smallest(schema: Any, root: Any = None, depth: int = 0) -> Any:
    """Return about the smallest value of a JSON Schema: only required properties, and no more items than required."""
    root = schema if root is None else root
    if not isinstance(schema, Mapping) or depth > 30:
        return None
    if "$ref" in schema:
        return smallest(_follow(root, str(schema["$ref"])), root, depth + 1)
    for fixed in ("const", "default"):
        if fixed in schema:
            return schema[fixed]
    if schema.get("enum"):
        return schema["enum"][0]
    for choice in ("anyOf", "oneOf", "allOf"):
        if schema.get(choice):
            return smallest(schema[choice][0], root, depth + 1)
    return _smallest_of_type(schema, root, depth)


def _smallest_of_type(schema: Mapping[str, Any], root: Any, depth: int) -> Any:
    kind = schema.get("type", "object" if "properties" in schema else None)
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        parts = schema.get("properties", {})
        return {name: smallest(parts.get(name, {}), root, depth + 1) for name in schema.get("required", ())}
    if kind == "array":
        return [smallest(schema.get("items", {}), root, depth + 1) for _ in range(schema.get("minItems", 0))]
    if kind == "string":
        return "x" * max(1, schema.get("minLength", 0))
    if kind in ("integer", "number"):
        return schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
    return False if kind == "boolean" else None


def _follow(root: Any, reference: str) -> Any:
    found = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        found = (
            found.get(part.replace("~1", "/").replace("~0", "~"), {}) if part and isinstance(found, Mapping) else found
        )
    return found
