"""Find personal data and secrets in a text, for the redaction rules r1.

Each finder yields its findings in order, without overlaps, in linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date

from aijobs.screening import secret_shapes as shapes
from aijobs.screening.secret_shapes import is_secret_name, looks_random


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding at `text[start:end]`. Findings with the same `value` are the same thing in different spellings."""

    start: int
    end: int
    value: str


Finder = Callable[[str], Iterator[Finding]]


def _found(match: re.Match[str], value: str | None = None) -> Finding:
    return Finding(match.start(), match.end(), match[0] if value is None else value)


# --- secrets ------------------------------------------------------------------------------------------------

_KEY_BODY = re.compile(r"(?:\s|\\[nr])*(?:[A-Za-z0-9+/=]{16}|Proc-Type|Version|Comment)")
_KEY_LINES = re.compile(r"[A-Za-z0-9+/=\s\\]*")
_LONGEST_KEY = 20_000


def private_keys(text: str) -> Iterator[Finding]:
    """Yield PEM blocks, even if their end was cut off. The BEGIN and END lines alone, as in a lesson, are none."""
    at = 0
    while (begin := shapes.PRIVATE_KEY_BEGIN.search(text, at)) is not None:
        at = begin.end()
        if not _KEY_BODY.match(text, at):
            continue
        end = shapes.PRIVATE_KEY_END.search(text, at, at + _LONGEST_KEY)
        lines = _KEY_LINES.match(text, at, at + _LONGEST_KEY)
        at = end.end() if end else lines.end() if lines else at
        yield Finding(begin.start(), at, text[begin.start() : at])


def url_credentials(text: str) -> Iterator[Finding]:
    """Yield `user:password` between `scheme://` and the host."""
    yield from map(_found, shapes.URL_CREDENTIALS.finditer(text)) if "://" in text and "@" in text else ()


def api_keys(text: str) -> Iterator[Finding]:
    """Yield keys with the prefixes of their providers."""
    yield from map(_found, shapes.API_KEY.finditer(text)) if any(map(text.__contains__, shapes.KEY_MARKS)) else ()


_BEARER = re.compile(r"(?i)(?<![A-Za-z0-9])bearer[ \t]{1,3}(?P<token>[A-Za-z0-9._~+/=-]{8,4000})")


def tokens(text: str) -> Iterator[Finding]:
    """Yield JSON web tokens, and random values after `Bearer`."""
    found = [_found(match) for match in shapes.JWT.finditer(text)] if "eyJ" in text else []
    for match in _BEARER.finditer(text) if "bearer" in text.lower() else ():
        if looks_random(match["token"]):
            found.append(Finding(match.start("token"), match.end("token"), match["token"]))
    yield from _without_overlaps(found)


_SEPARATOR = re.compile(r"[:=：]")
_NAME_BEFORE = re.compile(r"[\w.-]{1,64}\Z")
_SCHEME = re.compile(r"(?i)(?:bearer|basic|token)\s{1,3}")
_BARE = re.compile(r"[^\s\"'`,;&<>{}()\[\]，。；、]{1,500}")
_QUOTE = re.compile(r"\s{0,3}(?P<quote>\\{0,8}[\"'`])")
_SAID = re.compile(
    r"(?i)(?:password|passcode|passwd|passphrase|密码|口令)\s{0,3}(?:is|was|是|为)\s{0,3}(?P<value>[!-~]{6,200})"
)
_NAMING = "pass pwd secret token key credential authorization cookie connection 密 口 私 令".split()


def assigned_secrets(text: str) -> Iterator[Finding]:
    """Yield values after the name of a secret: `password=…`, `"api_key": "…"`, `密码：…`, `the password is …`.

    In prose (`Password: the first line of defence`) a value counts only if it looks random.
    """
    lowered = text.lower()
    if not any(map(lowered.__contains__, _NAMING)):
        return
    found: list[Finding] = []
    for separator in _SEPARATOR.finditer(text):
        if found and separator.start() < found[-1].end:
            continue
        value = _assigned(text, separator.start(), separator.end())
        if value is not None:
            found.append(Finding(*value, text[slice(*value)]))
    for said in _SAID.finditer(text):
        value_text = said["value"].rstrip(".,;:!?)\"'")
        if looks_random(value_text):
            found.append(Finding(said.start("value"), said.start("value") + len(value_text), value_text))
    yield from _without_overlaps(found)


def _assigned(text: str, before: int, after: int) -> tuple[int, int] | None:
    """Return the place of the value after a separator, if it is a secret's."""
    window = text[max(0, before - 80) : before]
    stripped = window.rstrip(" \t").rstrip("\"'`").rstrip("\\")
    name = _NAME_BEFORE.search(stripped)
    if name is None or not is_secret_name(name[0]):
        return None
    structured = len(stripped) < len(window.rstrip(" \t"))
    quote = _QUOTE.match(text, after)
    if quote is not None:
        end = text.find(quote["quote"], quote.end(), quote.end() + 2000)
        if quote.end() < end and (structured or looks_random(text[quote.end() : end])):
            return quote.end(), end
        return None
    start = after + len(text[after : after + 4]) - len(text[after : after + 4].lstrip(" \t"))
    scheme = _SCHEME.match(text, start)
    bare = _BARE.match(text, scheme.end() if scheme else start)
    if bare is None:
        return None
    tight = text[after - 1] == "=" and start == after and not window.endswith((" ", "=", "!", "<", ">"))
    if looks_random(bare[0]) or (len(bare[0].rstrip(".,:?")) >= 4 and (tight or scheme is not None)):
        return bare.start(), bare.start() + len(bare[0].rstrip(".,:?"))
    return None


# --- personal data ------------------------------------------------------------------------------------------

_LOCAL = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._%+-"
_DOMAIN = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9-])")


def emails(text: str) -> Iterator[Finding]:
    """Yield mail addresses, searched from their `@`."""
    at, end = text.find("@"), 0
    while at >= 0:
        window = text[max(end, at - 64) : at]
        local = window[len(window.rstrip(_LOCAL)) :].lstrip(".%+-")
        domain = _DOMAIN.match(text, at + 1) if local and not local.endswith(".") else None
        if domain is not None and text[max(0, at - len(local) - 3) : at - len(local)] != "://":
            start, end = at - len(local), domain.end()
            yield Finding(start, end, text[start:end].lower())
        at = text.find("@", at + 1)


_RESIDENT_ID = re.compile(r"(?<![0-9A-Za-z])[1-9][0-9]{16}[0-9Xx](?![0-9A-Za-z])")
_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)


def resident_ids(text: str) -> Iterator[Finding]:
    """Yield Chinese resident ids: with a real date of birth and the right check character."""
    for match in _RESIDENT_ID.finditer(text) if _MANY_DIGITS.search(text) else ():
        digits = match[0].upper()
        check = "10X98765432"[sum(int(d) * w for d, w in zip(digits, _WEIGHTS, strict=False)) % 11]
        if digits[-1] == check and _is_date(digits[6:14]):
            yield _found(match, digits)


def _is_date(digits: str) -> bool:
    try:
        return 1900 <= date(int(digits[:4]), int(digits[4:6]), int(digits[6:])).year <= 2100
    except ValueError:
        return False


_DIGIT_GROUPS = re.compile(r"[0-9]+(?:[ -][0-9]+)*")
_GROUP = re.compile(r"[0-9]+")
_CARD = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})|5[1-5]\d{14}|2(?:2[3-9]|[3-6]\d|7[01]|22|720)\d{13}|3[47]\d{13}"
    r"|(?:62|81)\d{14,17}|6(?:011|5\d\d|4[4-9]\d)\d{12,15}|35\d{14,17}|3(?:0[0-5]|[689]\d)\d{11,16}|(?:5[06-9]|6\d)\d{11,17}"
)
_LONGEST_CARD = 19


def cards(text: str) -> Iterator[Finding]:
    """Yield bank cards: 13–19 digits, grouped or not, of a known scheme, with the right check digit."""
    for cluster in _DIGIT_GROUPS.finditer(text):
        if len(cluster[0]) >= 13 and not _is_cut(text, cluster):
            yield from _cards_in(cluster)


def _is_cut(text: str, match: re.Match[str]) -> bool:
    """Return whether the digits are part of a longer word or number."""
    before, after = text[max(0, match.start() - 2) : match.start()], text[match.end() : match.end() + 2]
    last = before[-1:]
    begins_within = (last.isalnum() and last.isascii()) or last == "+" or (last in tuple(".,_") and before[0].isdigit())
    ends_within = after[:1].isalnum() and after[:1].isascii()
    return begins_within or ends_within


def _cards_in(cluster: re.Match[str]) -> Iterator[Finding]:
    groups = [(m.start(), m.end(), m[0]) for m in _GROUP.finditer(cluster.string, *cluster.span())]
    first = 0
    while first < len(groups):
        digits, longest = "", None
        for last in range(first, len(groups)):
            if last > first and min(len(groups[last][2]), len(groups[first][2])) == 1:
                break  # A row of single numbers.
            digits += groups[last][2]
            if len(digits) > _LONGEST_CARD:
                break
            if len(digits) >= 13 and _is_card(digits, [len(g[2]) for g in groups[first : last + 1]]):
                longest = last, digits
        if longest is None:
            first += 1
            continue
        yield Finding(groups[first][0], groups[longest[0]][1], longest[1])
        first = longest[0] + 1


def _is_card(digits: str, sizes: list[int]) -> bool:
    if len(sizes) > 1 and all(size == 3 for size in sizes[1:]):
        return False  # Groups of thousands.
    return _CARD.fullmatch(digits) is not None and _luhn(digits)


def _luhn(digits: str) -> bool:
    doubled = (int(d) * (1 + i % 2) for i, d in enumerate(reversed(digits)))
    return sum(d if d < 10 else d - 9 for d in doubled) % 10 == 0


_CHINESE_MOBILE = r"1[3-9][0-9](?P<gap>[ -]?)[0-9]{4}(?P=gap)[0-9]{4}"
_MANY_DIGITS = re.compile(r"[0-9][0-9() .-]{5,}[0-9]")
"""A cheap first test: no number is without it."""
_PHONE = re.compile(
    r"(?<![0-9A-Za-z_+])(?<![0-9][.,-])(?:"
    rf"(?:(?:\+|00)86[ -]?|\(\+?86\)[ ]?)?{_CHINESE_MOBILE}"
    r"|\+(?:1[ .-]?\(?[2-9]|[2-9])(?:[ .-]?\(?[0-9]\)?){7,13}"
    r"|0[1-9][0-9]{1,2}-[0-9]{7,8}"
    r")(?![0-9A-Za-z])(?![.,-][0-9])"
)


def phones(text: str) -> Iterator[Finding]:
    """Yield international numbers with `+`, Chinese mobiles, and Chinese landlines with area code and dash.

    A number without any of these may be anything in a school text, and stays.
    """
    for match in _PHONE.finditer(text) if _MANY_DIGITS.search(text) else ():
        digits = re.sub(r"[^0-9]", "", match[0])
        for prefix in ("0086", "86"):
            if len(digits) == len(prefix) + 11 and digits.startswith(prefix):
                digits = digits.removeprefix(prefix)
        yield _found(match, digits)


def _without_overlaps(found: list[Finding]) -> Iterator[Finding]:
    end = 0
    for finding in sorted(found, key=lambda f: (f.start, -f.end)):
        if finding.start >= end:
            yield finding
            end = finding.end


FINDERS: tuple[tuple[str, Finder], ...] = (
    ("PRIVATE_KEY", private_keys),
    ("CREDENTIALS", url_credentials),
    ("SECRET", assigned_secrets),
    ("KEY", api_keys),
    ("TOKEN", tokens),
    ("EMAIL", emails),
    ("ID", resident_ids),
    ("CARD", cards),
    ("PHONE", phones),
)
"""The finders by the word of their marks, in the order in which they run."""
