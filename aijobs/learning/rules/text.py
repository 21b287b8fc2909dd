"""From a segment of notes to its sentences, each with the place it has in the segment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

PROSE, ITEM = "prose", "item"
MAX_SENTENCE = 1000
"""Characters beyond which nothing is a sentence, but a text without full stops, and no quote for a card."""
MAX_HEADING = 200

_BREAK = re.compile(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_HEADING = re.compile(r"\s{0,3}(?:#{1,6}\s+|[一二三四五六七八九十]{1,3}、\s*)(?P<title>.*?)[\s#]*$")
_BULLET = re.compile(
    r"\s*(?:>\s?)*\s*(?:[-*+•·‣◦▪●○–]\s+|\(?\d{1,2}[.)）、](?!\d)\s*|（[\d一二三四五六七八九十]{1,3}）\s*|[①-⑳]\s*)"
)
_QUOTED = re.compile(r"\s*(?:>\s?)+")
_RULE = re.compile(r"\s*(?:[-*_=]\s*){3,}$")
_CODE = re.compile(r"\s*(?:```|~~~)")
_EMPHASIS = re.compile(r"(\*\*|__)(?=\S)(?P<strong>.+?)(?<=\S)\1")
_MARKS = re.compile(r"\*\*|__|(?<!\w)[*_`](?=\S)|(?<=\S)[*_`](?!\w)")
_LINK = re.compile(r"!?\[([^\]\[]*)\]\([^()\s]*\)")
_CJK = "\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef"
_WRAP_IN_CJK = re.compile(rf"(?<=[{_CJK}])\s*\n\s*(?=[{_CJK}])")

_ENDS = ".!?。！？…"
_CLOSERS = "\"'”’)]）」』】*_"
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[])(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|Sir|Mt|vs|etc|e\.g|i\.e|cf|approx|ca|c|fig|figs|eq|no|nos|vol|"
    r"pp?|ch|sec|al|Inc|Ltd|Co|U\.S|U\.K|B\.C|A\.D|a\.m|p\.m|[A-Z]|(?:[A-Z]\.)+[A-Z])\.$",
    re.IGNORECASE,
)
_GLANCE = 20
"""How far around a full stop is looked at: notes without any other mark must not cost their length squared."""
_LONG_LINE = {"en": 45, "zh": 22}


@dataclass(frozen=True, slots=True)
class Sentence:
    """One sentence, list item or heading line.

    `raw` is `segment[start:end]`, verbatim; `text` is the same for reading: one line, without markdown marks.
    `strong` are the words that the notes set in bold.
    """

    sid: str
    start: int
    end: int
    raw: str
    text: str
    kind: str
    heading: str
    strong: tuple[str, ...] = ()


@dataclass(slots=True)
class _Block:
    start: int
    end: int
    kind: str
    heading: str


def split_sentences(sid: str, text: str) -> list[Sentence]:
    """The sentences of a segment in order. Headings are kept as context only; code blocks and rules are left
    out.
    """
    found = []
    for block in _blocks(text):
        for start, end in _spans(text, block.start, block.end):
            raw = text[start:end]
            if len(raw) <= MAX_SENTENCE and (plain := clean(raw)):
                strong = tuple(clean(match["strong"]) for match in _EMPHASIS.finditer(raw))
                found.append(Sentence(sid, start, end, raw, plain, block.kind, block.heading, strong))
    return found


def clean(raw: str) -> str:
    """`raw` without markdown marks, and with its white space made one space (none between ideographs)."""
    text = _LINK.sub(r"\1", _BREAK.sub("\n", raw))
    text = _WRAP_IN_CJK.sub("", _MARKS.sub("", text))
    return " ".join(text.replace("\u200b", "").replace("\ufeff", "").split())


def _lines(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    for match in _BREAK.finditer(text):
        yield start, match.start()
        start = match.end()
    yield start, len(text)


def _blocks(text: str) -> Iterator[_Block]:
    """Paragraphs and list items: lines that belong together, since notes may be wrapped by hand."""
    heading, last_line, in_code = "", "", False
    current: _Block | None = None
    lines = list(_lines(text))
    for (start, end), following in zip(lines, [*lines[1:], (len(text), len(text))], strict=True):
        line, next_line = text[start:end], text[slice(*following)]
        # Marks stand at a line's beginning, and patterns for them may cost the square of what they are shown.
        indent = len(line) - len(line.lstrip())
        head = line[indent : indent + MAX_HEADING]
        is_short = indent + len(head) == len(line)
        is_code = bool(_CODE.match(head))
        in_code ^= is_code
        title = _HEADING.match(head) if is_short else None
        is_bare = not line.strip() or is_code or in_code or bool(_RULE.match(head)) or _is_table(line)
        if is_bare or title or (current is None and is_short and _looks_like_title(head, next_line)):
            if current is not None:
                yield current
                current = None
            if not is_bare:
                heading = clean(title["title"] if title else line).rstrip("：:")
            continue
        item = _BULLET.match(head)
        bullet = item or _QUOTED.match(head)
        if current is not None and not bullet and _goes_on(last_line, line, current.kind):
            current.end, last_line = end, line
            continue
        if current is not None:
            yield current
        offset = start + indent + (bullet.end() if bullet else 0)
        last_line = text[offset:end]
        current = _Block(offset, end, ITEM if item else PROSE, heading)
    if current is not None:
        yield current


def _is_table(line: str) -> bool:
    return line.lstrip().startswith("|") or line.count("|") > 1


def _looks_like_title(line: str, next_line: str) -> bool:
    """A short line that opens a block and is no sentence: plain-text notes have headings without marks."""
    text = line.strip()
    if next_line.strip()[:1].islower():
        return False
    if _BULLET.match(line) or not text or text[-1] in _ENDS + "，,；;" + _CLOSERS:
        return False
    if re.search(r"[：:—=]|\s[-–]\s", text.rstrip("：:")):
        return False
    is_chinese = bool(re.search(rf"[{_CJK}]", text))
    return len(text) <= 16 if is_chinese else len(text.split()) <= 8 and not re.search(r"\b(?:is|are|was|were)\b", text)


def _goes_on(last_line: str, line: str, kind: str) -> bool:
    """Whether `line` continues the block that ends with `last_line`, and isn't a note of its own."""
    last = last_line.rstrip()
    first = line.strip()[:1]
    if kind == ITEM and line[:1].isspace():
        return True
    if last[-1:] in _ENDS + _CLOSERS:
        return kind == PROSE and len(last) >= _LONG_LINE["en"]
    limit = _LONG_LINE["zh" if re.search(rf"[{_CJK}]", last) else "en"]
    return first.islower() or len(last) >= limit


def _spans(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Sentence bounds within a block."""
    begin, at = start, start
    while at < end:
        if text[at] in _ENDS and _is_end(text, begin, at, end):
            at += 1
            while at < end and text[at] in _ENDS + _CLOSERS:
                at += 1
            yield from _trimmed(text, begin, at)
            begin = at
        else:
            at += 1
    yield from _trimmed(text, begin, end)


def _is_end(text: str, begin: int, at: int, end: int) -> bool:
    if text[at] in "。！？":
        return True
    rest = text[at + 1 : min(end, at + _GLANCE)].lstrip(_ENDS + _CLOSERS)
    if not rest.strip():
        return True
    if not rest[0].isspace() and not re.match(rf"[{_CJK}]", rest):
        return False
    if text[at] == "." and _ABBREVIATION.search(text[max(begin, at - _GLANCE) : at + 1]):
        return False
    following = rest.lstrip()[:1]
    return not following.islower()


def _trimmed(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    while begin < end and text[begin].isspace():
        begin += 1
    while end > begin and text[end - 1].isspace():
        end -= 1
    if begin < end:
        yield begin, end
