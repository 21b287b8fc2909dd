"""Content safety: rules from YAML packs for the texts of a job, without a network.

A verdict allows, flags (a log line) or blocks. It holds ids of rules, and never the matched text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aijobs.canonical import IDENTIFIERS
from aijobs.screening.phrases import Owner, PhraseMatcher, Span, Spans
from aijobs.screening.rule_pack import BLOCK, CATEGORIES, FLAG, SELF_HARM, Rule, RulePack

ALLOW = "allow"


@dataclass(frozen=True)
class Verdict:
    """The verdict on texts: `action` is allow, flag or block, with the category and the rules."""

    action: str = ALLOW
    category: str | None = None
    rules: tuple[str, ...] = ()
    """Ids of all rules that matched, in order."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Matches of each rule."""

    @property
    def is_self_harm(self) -> bool:
        """Whether the learner may be about to hurt themselves: answer with care."""
        return self.action == BLOCK and self.category == SELF_HARM


class ContentSafety:
    """Judges texts by a pack of rules. Thread-safe."""

    def __init__(self, pack: RulePack) -> None:
        self._pack = pack
        owned = [(("rule", rule.id), variant) for rule in pack.rules.values() for variant in rule.phrases]
        owned += [(("except", rule.id), variant) for rule in pack.rules.values() for variant in rule.exceptions]
        owned += [(("context", name), variant) for name, variants in pack.contexts.items() for variant in variants]
        self._matcher = PhraseMatcher(owned, pack.alike)

    @classmethod
    def load(cls, extra: Path | None = None) -> ContentSafety:
        """Return it with the built-in rules for English and Chinese, and those of the file `extra` on top.

        `SettingsError` if a file can't be read or a rule is wrong.
        """
        return cls(RulePack.load(extra))

    def check(self, texts: Iterable[str]) -> Verdict:
        """Return the verdict on these texts together; each is read separately. Its category is the most serious one."""
        actions: dict[str, str] = {}
        counts: dict[str, int] = {}
        for text in texts:
            for rule, action in self._hits(text):
                counts[rule.id] = counts.get(rule.id, 0) + 1
                if actions.get(rule.id) != BLOCK:
                    actions[rule.id] = action
        if not actions:
            return Verdict()
        worst = BLOCK if BLOCK in actions.values() else FLAG
        categories = {self._pack.rules[rule_id].category for rule_id, action in actions.items() if action == worst}
        return Verdict(worst, min(categories, key=CATEGORIES.index), tuple(sorted(actions)), counts)

    def _hits(self, text: str) -> Iterator[tuple[Rule, str]]:
        """Yield each match of a rule, with the action it asks for there."""
        found = self._matcher.find(text)
        around = {owner: Spans(spans) for owner, spans in found.items() if owner[0] != "rule"}
        for (kind, name), spans in found.items():
            if kind == "rule":
                yield from self._judged(self._pack.rules[name], spans, around)

    def _judged(self, rule: Rule, spans: list[Span], around: Mapping[Owner, Spans]) -> Iterator[tuple[Rule, str]]:
        nothing = Spans()
        exceptions = around.get(("except", rule.id), nothing)
        contexts = [around[key] for name in rule.near if (key := ("context", name)) in around]
        for span in spans:
            if exceptions.touch(span.start, span.end):
                continue
            if not any(c.touch(span.start - rule.within, span.end + rule.within) for c in contexts):
                yield rule, rule.action
            elif rule.action == BLOCK:
                yield rule, FLAG


def texts_of(content: Any, *, identifiers: bool) -> Iterator[str]:
    """Yield all strings of a JSON value, names included. With `identifiers` false, not those under the app's
    own ids.
    """
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        for name, inner in content.items():
            yield name
            if identifiers or name not in IDENTIFIERS or not isinstance(inner, str):
                yield from texts_of(inner, identifiers=identifiers)
    elif isinstance(content, list | tuple):
        for inner in content:
            yield from texts_of(inner, identifiers=identifiers)
