"""Rules for English: what a sentence defines, names, counts or locates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from aijobs.learning.rules.english_words import (
    FIXED_HEADS,
    GENERIC_LABELS,
    LIKE_NAMES,
    NO_DEFINITION,
    NO_SUBJECT_END,
    NO_SUBJECT_INSIDE,
    NO_SUBJECT_START,
    OPENERS,
    PEOPLE,
    POINTING,
    SINGULAR_S,
    UNITS,
    VAGUE_HEADS,
    VERBS_OF_CREDIT,
)
from aijobs.learning.rules.facts import ACRONYM, DEFINITION, NAME, NUMBER, QUESTION, TERM, Fact
from aijobs.learning.rules.text import Sentence

_LEAD = r"(?P<lead>(?:In|For|During|At) [^,;:.]{2,40}, )?"
_PAIR = re.compile(r"(?P<term>[^:;.,!?=—–]{2,60}?)\s*(?::(?!//)|\s[-–—=]\s|—)\s*(?P<rest>\S.*)")
_COPULA = re.compile(
    _LEAD + r"(?P<subject>[^,;:()]{2,70}?(?: \([^()]{1,40}\))?)"
    r"(?:, (?:also|often|sometimes) (?:called|known as) [^,]{2,40},)? (?P<verb>is|are|was|were) (?P<rest>.+)"
)
_KIND_OF = re.compile(r"(?:an?|the|any|one of|part of|another name for|what|where|when|how) ", re.IGNORECASE)
_KINDS = re.compile(
    r"(?:[a-z-]+ ){0,3}(?:[a-z-]{2,}s|bacteria|fungi|people|cells|women|men),? "
    r"(?:that|which|who|whose|where|with|of|made|used|found|formed|containing|in|on|through)\b"
)
_CALLED = re.compile(
    r"(?P<subject>[^,;:]{8,140}?) (?P<verb>is|are|was|were) "
    r"(?:called|known as|termed|named|referred to as) (?P<term>[^,;:.()]{2,60}?)(?P<rest>[,;(].*)?[.!]?"
)
_MEANS = re.compile(r"(?P<subject>[^,;:]{2,60}?) (?P<verb>means|refers to|stands for) (?P<rest>[^?]+)")
_WHERE = re.compile(
    _LEAD + r"(?P<subject>[^,;:]{2,80}?) (?:also |mainly |usually |normally )?"
    r"(?P<verb>takes? place|occurs?|happens?) "
    r"(?P<rest>(?:in|inside|within|on|across) (?:the |a |an )?[^,;.]{3,80}).*"
)
_NOT_A_PLACE = re.compile(
    r"\d|\b(?:stages?|steps?|phases?|parts?|winter|summer|spring|autumn|years?|centur|days?|night|minutes?|seconds?|"
    r"hours?|darkness|dark|light|ways?|order|time|temperatures?|response|turn|two|three|four|presence|absence)\b"
)
_THERE = re.compile(
    r"There (?P<verb>are|were) (?P<count>two|three|four|five|six|seven|eight|nine|ten|\d{1,2}) "
    r"(?P<what>[^:,.;]{3,60}):\s"
    r"(?P<rest>.+)"
)
_COUNTED = re.compile(
    r"The (?P<count>two|three|four|five|six|seven|eight|nine|ten) (?P<what>[^:,.;]{3,60}?) "
    r"(?P<verb>are|were):? (?P<rest>[^.;]+(?:, | and )[^.;]+)"
)
_CREDIT = re.compile(
    r"(?P<lead>In (?P<year>\d{3,4}),? )?(?P<who>[^,;:]{4,70}?) (?:first |later |also )?"
    rf"(?P<verb>{VERBS_OF_CREDIT}) (?P<rest>.+)"
)
_CAPITAL = r"[A-Z][\w'’-]*[a-z][\w'’-]*"
_PERSON = re.compile(
    rf"(?:{_CAPITAL}|[A-Z]\.)(?: (?:(?:and|of|de|van|von|der|the|da|al) )*(?:{_CAPITAL}|[A-Z]\.|[IVX]+\b))*"
)
_EXPANDED = re.compile(r"(?P<long>[^.;:!?()]{4,120}) \((?P<short>[A-Z][A-Za-z]{0,4}[A-Z]s?)\)")
_EXPLAINED = re.compile(r"\b(?P<short>[A-Z][A-Za-z]{0,4}[A-Z]) \((?P<long>[A-Za-z][a-z -]{5,80})\)")
_FIGURE = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
_NUMBER = re.compile(
    rf"(?<![\w.,$£€-])(?:[$£€]\s?)?(?:{_FIGURE})(?:\s?(?:to|and|–|-)\s?(?:{_FIGURE}))?(?:\s?(?:{UNITS})(?!\w))?(?![\w]|[.,]\d)"
)
_BARE_RANGE = re.compile(r"\d+ (?:to|and) \d+")
_AFTER_LABEL = re.compile(
    r"(?:figure|fig\.|chapter|page|step|section|table|question|exercise|unit|lesson|no\.)\s$", re.I
)
_SAYS_LITTLE = re.compile(
    r"\b(?:to know|to remember|are important|is important|"
    r"there (?:are|is) (?:two|three|four|many|several|some|a few))\b",
    re.I,
)
_NAMES_A_THING = re.compile(
    r"(?:\b(?:type|grade|level|version|group|period|act|scene|article|part|number|size|model|day|room)|"
    r"[a-z] [A-Z][a-z]+) $"
)
_FIRST_PERSON = re.compile(r"\b(?:I|we|us|our|you|your|my|let's|me)\b", re.IGNORECASE)
_MARKUP = re.compile(r"<\w|\{\{|\}\}|::|https?:|www\.")
_WORD = re.compile(r"[A-Za-z][\w'’-]*")
_COMMON_NOUN = re.compile(
    r"(?:tion|sion|sis|ment|ness|ance|ence|ogy|ase|ose|zyme|phyll|plast|some|ing|ism|ysis|ade|gen|um|ics|ide|ant)s?\Z"
)


class EnglishRules:
    """Facts of English sentences. `sentences` is the whole text, from which it learns which words are names."""

    def __init__(self, sentences: Sequence[Sentence]) -> None:
        self._lowered: set[str] = set()
        self._capitalised: set[str] = set()
        self._all = " ".join(sentence.text for sentence in sentences).lower()
        for sentence in sentences:
            for index, match in enumerate(_WORD.finditer(sentence.text)):
                word = match.group()
                if word[0].islower():
                    self._lowered.add(word)
                elif index and word[1:].islower():
                    self._capitalised.add(word)

    # -- what a sentence says outright
    # -------------------------------------------------------------------------

    def statements(self, sentence: Sentence) -> Iterator[Fact]:
        """Yield what `sentence` defines or answers by itself, best first."""
        text = sentence.text
        if _MARKUP.search(text) or text.endswith("?") or _FIRST_PERSON.search(text):
            return
        yield from self._acronyms(sentence)
        if (pair := self._pair(sentence)) is not None:
            yield pair
            return
        body = _after_label(text)
        if body is None:
            return
        rules: tuple[Callable[[Sentence, str], Fact | None], ...] = (
            self._called,
            self._copula,
            self._means,
            self._counted,
        )
        whole = _is_whole(sentence)
        for rule in (*rules, self._credit, self._where) if whole else rules:
            if (fact := rule(sentence, body)) is not None:
                yield fact
                return

    def _pair(self, sentence: Sentence) -> Fact | None:
        match = _PAIR.fullmatch(sentence.text)
        if match is None:
            return None
        term, rest = match["term"].strip(), match["rest"]
        words = term.split()
        generic = term.lower() in GENERIC_LABELS or words[-1].lower() in GENERIC_LABELS
        if generic or len(words) > 6 or words[0].lower() in NO_SUBJECT_START or words[-1].lower() in NO_SUBJECT_END:
            return None
        if not _WORD.search(term) or len(rest.split()) < 3 or re.search(r"\b(?:is|are|was|were|has|have)\b", term):
            return None
        if self._is_vague(term) or (re.search(r"\d\s*$", term) and re.match(r"\d", rest)):
            return None
        fact = self._what_is(sentence, term, "are" if self._is_plural(term) else "is", rest)
        if fact.question == f"What is {term}?" and re.match(r"an? ", rest):
            # It is unknown whether the word takes an article; this question needs none.
            return replace(fact, question=f"What is meant by “{term}”?")
        return fact

    def _copula(self, sentence: Sentence, text: str) -> Fact | None:
        match = _COPULA.fullmatch(text)
        if match is None:
            return None
        subject, verb, rest = match["subject"], match["verb"], match["rest"]
        if not self._can_be_asked_about(subject, 7) or rest.lower().startswith(NO_DEFINITION):
            return None
        defines = bool(_KIND_OF.match(rest)) or (verb in ("are", "were") and bool(_KINDS.match(rest)))
        bare = subject.lower().removeprefix("the ").removeprefix("main ").split(" of ")[0]
        fixed = " of " in subject and bare in FIXED_HEADS and subject.startswith("The ")
        if not (defines and len(rest.split()) >= 4) and not (fixed and 1 <= len(rest.split()) <= 25):
            return None
        if fixed and re.match(r"(?:\w+ed|\w+ly|not|high|low|higher|lower|very|more|less)\b", rest):
            return None
        if self._is_vague(subject):
            return None
        return self._what_is(sentence, subject, verb, rest, match["lead"] or "")

    def _what_is(self, sentence: Sentence, term: str, verb: str, rest: str, lead: str = "") -> Fact:
        asked = self.in_sentence(term)
        if verb == "is" and re.match(r"an? ", rest) and self._is_counted(asked):
            asked = f"{'an' if asked[0] in 'aeiou' else 'a'} {asked}"
        person = self._is_person(term) and bool(re.search(rf"\b(?:{PEOPLE})\b", " ".join(rest.split()[:12]), re.I))
        who = "who" if person else "what"
        question = f"{lead}{who if lead else who.capitalize()} {verb} {asked}?"
        return Fact(DEFINITION, "en", sentence, question, _as_answer(rest), term=_bare(asked))

    def _called(self, sentence: Sentence, text: str) -> Fact | None:
        match = _CALLED.fullmatch(text)
        if match is None or not self._can_be_asked_about(match["subject"], 22, inside=False):
            return None
        term = re.sub(r"^(?:an?|the) ", "", match["term"])
        if len(term.split()) > 5 or re.search(r"\b(?:because|when|if|after|by|in|for|to|as)\b", term):
            return None
        question = f"What {match['verb']} {self.in_sentence(match['subject'])} called?"
        return Fact(DEFINITION, "en", sentence, question, _as_answer(match["term"]), term=term)

    def _means(self, sentence: Sentence, text: str) -> Fact | None:
        match = _MEANS.fullmatch(text)
        if match is None or not self._can_be_asked_about(match["subject"], 6) or self._is_vague(match["subject"]):
            return None
        if match["rest"].startswith(("that ", "it ", "there ")) or len(match["rest"].split()) < 2:
            return None
        asked = self.in_sentence(match["subject"])
        verb = {"means": "mean", "refers to": "refer to", "stands for": "stand for"}[match["verb"]]
        return Fact(
            DEFINITION,
            "en",
            sentence,
            f"What does {asked} {verb}?",
            _as_answer(match["rest"]),
            term=_bare(asked),
        )

    def _counted(self, sentence: Sentence, text: str) -> Fact | None:
        match = _THERE.fullmatch(text) or _COUNTED.fullmatch(text)
        if match is None or POINTING.search(text) or match["what"].split()[0] in ("most", "more", "other"):
            return None
        question = f"What {match['verb']} the {match['count']} {match['what']}?"
        return Fact(QUESTION, "en", sentence, question, _as_answer(match["rest"]), term=match["what"])

    def _credit(self, sentence: Sentence, text: str) -> Fact | None:
        match = _CREDIT.fullmatch(text)
        if match is None or POINTING.search(text):
            return None
        who, rest = match["who"], match["rest"].rstrip(".!")
        name = _PERSON.search(re.sub(r"^(?:The|A|An) ", "", who))
        if name is None or not who.endswith(name.group()) or not 1 <= len(rest.split()) <= 28:
            return None
        if " " not in name.group() and name.group() not in self._capitalised:
            return None
        if re.match(r"(?:his|her|their|its|it|this|these|in|at|with|by)\b", rest):
            return None
        when = f"{match['lead'].strip(' ,')}, " if match["lead"] else ""
        question = f"{when}{'who' if when else 'Who'} {match['verb']} {rest}?"
        return Fact(QUESTION, "en", sentence, question, _as_answer(who), term=who)

    def _where(self, sentence: Sentence, text: str) -> Fact | None:
        match = _WHERE.fullmatch(text)
        if match is None or not self._can_be_asked_about(match["subject"], 8) or self._is_vague(match["subject"]):
            return None
        place = match["rest"]
        if _NOT_A_PLACE.search(place) or POINTING.search(text):
            return None
        plural = match["verb"] in ("take place", "occur", "happen")
        asked = self.in_sentence(match["subject"])
        base = {"takes place": "take place", "occurs": "occur", "happens": "happen"}.get(match["verb"], match["verb"])
        lead = match["lead"] or ""
        question = f"{lead}{'where' if lead else 'Where'} {'do' if plural else 'does'} {asked} {base}?"
        return Fact(QUESTION, "en", sentence, question, _as_answer(place), term=f"where {asked}")

    def _acronyms(self, sentence: Sentence) -> Iterator[Fact]:
        for match in (*_EXPANDED.finditer(sentence.text), *_EXPLAINED.finditer(sentence.text)):
            short = match["short"].rstrip("s") if match["short"][-2:-1].isupper() else match["short"]
            long = _expansion(short, match["long"])
            if long:
                yield Fact(ACRONYM, "en", sentence, f"What does {short} stand for?", _as_answer(long), term=short)

    # -- what can be hidden in a sentence
    # -----------------------------------------------------------------------

    def gaps(self, sentence: Sentence, terms: Sequence[str]) -> Iterator[Fact]:
        """Yield what can be hidden in `sentence`: one of `terms`, otherwise a number, otherwise a name; none that gives
        itself away.
        """
        text = OPENERS.sub("", sentence.text)
        text = text[:1].upper() + text[1:]
        if not (_is_whole(sentence) and _stands_alone(text) and 6 <= len(text.split()) <= 42):
            return
        lowered = text.lower()
        for term in () if _SAYS_LITTLE.search(text) else terms:
            # Search the plain text first: a pattern per term and sentence would take too long.
            match = _find_word(term, text) if term.lower() in lowered else None
            if match and _share(match.group(), text) <= 0.5 and len(text.split()) >= 8:
                yield Fact(TERM, "en", sentence, text, gap=match.group(), term=term)
        for match in _NUMBER.finditer(text):
            if not _AFTER_LABEL.search(text[: match.start()]) and _tells_something(match, text):
                yield Fact(NUMBER, "en", sentence, text, gap=match.group().strip(), term=match.group().strip())
                break
        for name in self._names(text):
            yield Fact(NAME, "en", sentence, text, gap=name, term=name)
            break

    def _names(self, text: str) -> list[str]:
        found = []
        for match in _PERSON.finditer(text):
            name = re.sub(r"^(?:The|A|An|In|At|On|By|For|From|When|After|Before|Both|Since) ", "", match.group())
            at_start = match.start() == 0 and name == match.group()
            if at_start and " " not in name and name not in self._capitalised:
                continue
            if name.lower() in LIKE_NAMES or name.lower() in self._lowered or name.lower().endswith(("ish", "ese")):
                continue
            if " " not in name and (name.endswith(("ian", "ean")) or len(name) < 3):
                continue
            if at_start and " " in name and name.split()[0].lower() in self._lowered:
                continue
            found.append(name)
        return sorted(found, key=lambda name: -name.count(" "))

    # -- words
    # ----------------------------------------------------------------------------------------------------

    def in_sentence(self, subject: str) -> str:
        """Return `subject` as written inside a sentence: a capital only if it belongs to the word."""
        first, space, rest = subject.partition(" ")
        if first in ("A", "An", "The"):
            return first.lower() + space + rest
        if not first[:1].isupper() or not first[1:].islower() or first in self._capitalised:
            return subject
        lowered = first.lower()
        if lowered in self._lowered or _COMMON_NOUN.search(lowered) or (lowered + "s") in self._lowered:
            return lowered + space + rest
        if space and not re.search(r"\b[A-Z]", rest) and (lowered.rstrip("s") in self._lowered):
            return lowered + space + rest
        return subject

    def _can_be_asked_about(self, subject: str, words: int, inside: bool = True) -> bool:
        parts = subject.split()
        if len(parts) > words or parts[0].lower() in NO_SUBJECT_START or parts[-1].lower() in NO_SUBJECT_END:
            return False
        if inside and any(part.lower() in NO_SUBJECT_INSIDE for part in parts):
            return False
        return not POINTING.search(subject) and bool(_WORD.search(subject)) and len(subject) > 1

    @staticmethod
    def _is_vague(subject: str) -> bool:
        bare = _bare(subject.lower())
        return bool(VAGUE_HEADS.fullmatch(bare))

    def _is_person(self, term: str) -> bool:
        match = _PERSON.fullmatch(re.sub(r"^(?:Dr\.?|Sir|Professor) ", "", term))
        return match is not None and " " in term and not term.startswith(("The ", "A ", "An "))

    def _is_counted(self, term: str) -> bool:
        """Return whether the notes use a word with "a" or in the plural, so that it needs an article."""
        if not re.fullmatch(r"[a-z][a-z -]+", term) or term.startswith(("a ", "an ", "the ")):
            return False
        return bool(re.search(rf"\b(?:an? {re.escape(term)}|{re.escape(term)}e?s)\b", self._all))

    @staticmethod
    def _is_plural(term: str) -> bool:
        last = re.sub(r"\s*\([^()]*\)$", "", term).split(" of ")[0].split()[-1].lower()
        if last in ("bacteria", "fungi", "stomata", "mitochondria", "nuclei", "people", "data", "phenomena"):
            return True
        return last.endswith("s") and not last.endswith(("ss", "us", "is", "ics")) and last not in SINGULAR_S


def _after_label(text: str) -> str | None:
    """Return `text` without a label like "Definition:"; None if the rest is no sentence."""
    label, colon, rest = text.partition(":")
    if colon and label.strip().lower() in GENERIC_LABELS:
        return rest.strip() or None
    return text


def _is_whole(sentence: Sentence) -> bool:
    """Return whether it ends like a sentence. A list item without a full stop may lack its subject."""
    return bool(re.search(r"[.!][\"'”’)\]]*$", sentence.text)) and sentence.text[:1].isupper()


def _stands_alone(text: str) -> bool:
    if _MARKUP.search(text) or _FIRST_PERSON.search(text) or "?" in text or POINTING.search(text):
        return False
    first = text.split(maxsplit=1)[0].lower().strip(",")
    if first in NO_SUBJECT_START and first not in (
        "there",
        "each",
        "most",
        "many",
        "some",
        "all",
        "both",
        "one",
    ):
        return first in ("when", "if", "because", "while", "although", "in", "on", "at") and not _leans(text)
    return not _leans(text) and not (_is_command(text))


def _leans(text: str) -> bool:
    """Return whether a pronoun comes before anything that it could refer to."""
    clause = re.split(r"[,;:]", text)[0]
    opening = " ".join(text.split()[:4]).lower()
    if re.search(r"\b(?:it|they|he|she|them|his|her|their|its)\b", opening):
        return True
    return bool(re.search(r"\b(?:he|she|his|her)\b", text, re.I)) and not _PERSON.search(clause)


def _is_command(text: str) -> bool:
    """Return whether the notes tell the learner to do something."""
    return bool(
        re.match(r"(?:Remember|Note|Notice|Learn|See|Look|Consider|Draw|Write|Revise|Read|Do not|Don't)\b", text)
    )


def _find_word(term: str, text: str) -> re.Match[str] | None:
    return re.search(rf"(?<![\w-]){re.escape(term)}(?:e?s)?(?![\w-])", text, re.IGNORECASE)


def _share(part: str, whole: str) -> float:
    return len(part.split()) / max(1, len(whole.split()))


def _tells_something(match: re.Match[str], text: str) -> bool:
    """Return whether a number is more than a figure at the start, a list's number, or part of a formula or date."""
    figure = match.group()
    before, after = text[: match.start()], text[match.end() :]
    if figure.strip().isdigit() and _NAMES_A_THING.search(before):
        return False
    if not before.strip() or re.match(r"\s?[+=×*/^→]", after) or re.search(r"[+=×*/^→]\s?$", before):
        return False
    if re.search(r"between\s$", before) or not _BARE_RANGE.fullmatch(figure):
        return not re.search(r"[A-Za-z]\($", before)
    return True


def _bare(term: str) -> str:
    return re.sub(r"\s*\([^()]*\)$", "", re.sub(r"^(?:an?|the) ", "", term, flags=re.IGNORECASE))


def _as_answer(text: str) -> str:
    """Return an answer with a capital, unless its first word has its own form (pH, mRNA)."""
    if len(text.split()) <= 4:
        text = text.rstrip(".!")
    first = text.split()[0] if text.split() else ""
    return text[:1].upper() + text[1:] if first[1:].islower() or len(first) == 1 else text


def _expansion(short: str, before: str) -> str:
    """Return the last words of `before` that `short` abbreviates; empty if it abbreviates none."""
    words = re.findall(r"[\w'’-]+", before)
    letters = short.lower()
    for count in range(1, min(len(words), len(letters) + 3) + 1):
        tail = words[-count:]
        if tail[0][:1].lower() == letters[0] and _abbreviates(letters, tail) and len(" ".join(tail)) > len(short) + 2:
            start = before.rfind(tail[0]) if count == 1 else _start_of(before, tail)
            return before[start:].strip() if start >= 0 else ""
    return ""


def _start_of(before: str, tail: Sequence[str]) -> int:
    match = re.search(r"[^\w]+".join(map(re.escape, tail)) + r"\W*$", before)
    return match.start() if match else -1


def _abbreviates(letters: str, words: Sequence[str]) -> bool:
    """Return whether each letter occurs in order, and most words begin with one: deoxyribonucleic acid gives DNA, "a
    big apple" doesn't.
    """
    joined, at = " ".join(words).lower(), 0
    for letter in letters:
        at = joined.find(letter, at) + 1
        if not at:
            return False
    initials = sum(1 for word in words if word[:1].lower() in letters)
    return initials == len([word for word in words if word.lower() not in ("of", "and", "the", "for", "in")])
