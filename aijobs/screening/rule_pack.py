"""The safety rules as data: YAML packs, read strictly.

    language: en
    alike: {а: a}                       # characters that count as others
    contexts:
      literature: [novel, "act (one|two|three)"]
    rules:
      - id: en-weapons-how-to
        category: weapons               # one of CATEGORIES
        action: block                   # or flag
        phrases: ["how to (make|build) ~4 bomb"]
        except: [bath bomb]             # a phrase that overlaps one of these doesn't count
        near: [literature]              # a context within `within` words makes the rule one step milder
        within: 25
    off: [zh-hate-slurs]                # rules of packs read before that don't hold

What a phrase may look like stands in `phrases`. A rule whose id was there before replaces that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from aijobs.errors import SettingsError
from aijobs.screening.phrases import Variant, parse_phrase

BUILT_IN = Path(__file__).with_name("safety_rules")
BLOCK, FLAG = "block", "flag"
SELF_HARM = "self_harm"
CATEGORIES = (SELF_HARM, "sexual_minors", "weapons", "violence", "hate", "drugs", "sexual")
"""Most serious first: a learner who may hurt themselves gets a careful answer, whatever else they say."""
WITHIN = 25
"""Default distance of a context, in words."""

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PACK_FIELDS = frozenset({"language", "alike", "contexts", "rules", "off"})
_RULE_FIELDS = frozenset({"id", "category", "action", "phrases", "except", "near", "within"})


@dataclass(frozen=True)
class Rule:
    """One rule and its phrases."""

    id: str
    language: str
    category: str
    action: str
    phrases: tuple[Variant, ...] = field(repr=False)
    exceptions: tuple[Variant, ...] = field(repr=False, default=())
    near: tuple[str, ...] = ()
    within: int = WITHIN


@dataclass
class RulePack:
    """All active rules, and their contexts."""

    rules: dict[str, Rule] = field(default_factory=dict)
    contexts: dict[str, tuple[Variant, ...]] = field(default_factory=dict)
    alike: dict[int, str] = field(default_factory=dict)

    @classmethod
    def load(cls, extra: Path | None = None) -> RulePack:
        """Return the built-in packs with `extra` on top. `SettingsError` names the file, the rule and the fault."""
        built_in = _built_in()
        pack = cls(dict(built_in.rules), dict(built_in.contexts), dict(built_in.alike))
        if extra is not None:
            pack.add(extra.name, _read(extra))
        return pack

    def add(self, name: str, document: Any) -> None:
        """Add a pack; its rules replace those with the same id. `name` is for error messages."""
        _check_fields(name, document, _PACK_FIELDS)
        language = document.get("language")
        if not isinstance(language, str) or not language:
            raise SettingsError(f"{name}: `language` is missing")
        self.alike |= _alike(name, document.get("alike") or {})
        for context, phrases in _mapping(name, "contexts", document).items():
            self.contexts[str(context)] = self._phrases(f"{name}: context {context!r}", phrases)
        for gone in _list(name, "off", document.get("off", [])):
            if self.rules.pop(gone, None) is None:
                raise SettingsError(f"{name}: `off` names {gone!r}, and there is no such rule")
        seen: set[str] = set()
        for entry in _list(name, "rules", document.get("rules", [])):
            rule = self._rule(name, language, entry)
            if rule.id in seen:
                raise SettingsError(f"{name}: rule {rule.id!r} stands twice")
            seen.add(rule.id)
            self.rules[rule.id] = rule

    def _rule(self, name: str, language: str, entry: Any) -> Rule:
        rule_id = entry.get("id") if isinstance(entry, Mapping) else None
        if not isinstance(rule_id, str) or not rule_id:
            raise SettingsError(f"{name}: a rule has no `id`")
        at = f"{name}: rule {rule_id!r}"
        _check_fields(at, entry, _RULE_FIELDS)
        for key, allowed in (("category", CATEGORIES), ("action", (BLOCK, FLAG))):
            if entry.get(key) not in allowed:
                raise SettingsError(f"{at}: `{key}` is {entry.get(key)!r}; it is one of {', '.join(allowed)}")
        within = entry.get("within", WITHIN)
        if not isinstance(within, int) or isinstance(within, bool) or not 1 <= within <= 1000:
            raise SettingsError(f"{at}: `within` is {within!r}; it is a number of words, 1–1000")
        near = _list(at, "near", entry.get("near", []))
        if unknown := [context for context in near if context not in self.contexts]:
            raise SettingsError(f"{at}: `near` names {unknown[0]!r}, and there is no such context")
        if not entry.get("phrases"):
            raise SettingsError(f"{at}: it has no `phrases`")
        return Rule(
            id=rule_id,
            language=language,
            category=entry["category"],
            action=entry["action"],
            phrases=self._phrases(at, entry["phrases"]),
            exceptions=self._phrases(at, entry.get("except", [])),
            near=tuple(near),
            within=within,
        )

    def _phrases(self, at: str, sources: Any) -> tuple[Variant, ...]:
        variants: list[Variant] = []
        for source in _list(at, "phrases", sources):
            try:
                variants += parse_phrase(source, self.alike)
            except ValueError as error:
                raise SettingsError(f"{at}: {error}") from None
        return tuple(variants)


@cache
def _built_in() -> RulePack:
    pack = RulePack()
    for path in sorted(BUILT_IN.glob("*.yaml")):
        pack.add(path.name, _read(path))
    return pack


def _read(path: Path) -> Any:
    try:
        return yaml.load(path.read_text("utf-8"), _Loader)  # noqa: S506  (a safe loader, in C where it is built)
    except (OSError, ValueError) as error:
        raise SettingsError(f"the safety rules {path} can't be read ({type(error).__name__})") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path.name} is no YAML: {error}") from None


def _check_fields(at: str, entry: Any, known: Iterable[str]) -> None:
    if not isinstance(entry, Mapping):
        raise SettingsError(f"{at}: expected fields, found {type(entry).__name__}")
    if unknown := sorted(str(key) for key in entry if key not in known):
        raise SettingsError(f"{at}: {unknown[0]!r} is no field; there are {', '.join(sorted(known))}")


def _mapping(at: str, key: str, document: Mapping[str, Any]) -> Mapping[Any, Any]:
    value = document.get(key) or {}
    if not isinstance(value, Mapping):
        raise SettingsError(f"{at}: `{key}` is a mapping")
    return value


def _list(at: str, key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise SettingsError(f"{at}: `{key}` is a list")
    return value


def _alike(name: str, given: Any) -> dict[int, str]:
    if not isinstance(given, Mapping):
        raise SettingsError(f"{name}: `alike` is a mapping of characters")
    for key, value in given.items():
        if not (isinstance(key, str) and isinstance(value, str) and len(key) == len(value) == 1):
            raise SettingsError(f"{name}: `alike` maps one character to one, not {key!r} to {value!r}")
    return {ord(key): value for key, value in given.items()}
