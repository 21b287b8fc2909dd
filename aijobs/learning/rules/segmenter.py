"""Chinese words, by jieba, with its dictionary's cache where we say and nobody else writes."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aijobs.forks import new_lock


@dataclass(frozen=True, slots=True)
class Word:
    """A word, its part of speech in jieba's letters, where it stands, and whether the dictionary knows it."""

    text: str
    flag: str
    start: int
    known: bool


class Segmenter:
    """Words of Chinese text. The dictionary is loaded once, by the first text that needs it, in whatever
    thread.
    """

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir
        self._lock = new_lock()
        self._tokenizer: Any = None
        self._tagger: Any = None

    def words(self, text: str) -> list[Word]:
        """The words of `text`, punctuation and spaces included, so that they make up all of it."""
        tagger = self._loaded()
        found, at = [], 0
        for pair in tagger.cut(text):
            found.append(Word(pair.word, pair.flag, at, bool(self._tokenizer.FREQ.get(pair.word))))
            at += len(pair.word)
        return found

    def _loaded(self) -> Any:
        if self._tagger is None:
            with self._lock:
                if self._tagger is None:
                    self._tokenizer, self._tagger = self._load()
        return self._tagger

    def _load(self) -> tuple[Any, Any]:
        # Older resource APIs that jieba imports warn on newer setuptools; the warning is not for our users.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import jieba
            import jieba.posseg
        jieba.setLogLevel(logging.ERROR)
        self._cache_dir.mkdir(parents=True, exist_ok=True)
        # A tokenizer of our own, since the shared one reads a file with a known name in the temporary folder,
        # which any user of the machine may have put there.
        tokenizer = jieba.Tokenizer()
        tokenizer.cache_file = str(self._cache_dir.resolve() / "jieba.cache")
        tokenizer.initialize()
        tagger = jieba.posseg.POSTokenizer(tokenizer)
        tagger.initialize()
        return tokenizer, tagger
