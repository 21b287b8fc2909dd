"""The built-in provider: makes items by rules from the learner's own text, without network, key or model.

Reading order: provider (the port), text (segments to sentences), english and chinese (sentences to facts), flashcards
(facts to cards).
"""

from aijobs.learning.rules.provider import MODEL, NAME, LocalProvider

__all__ = ["MODEL", "NAME", "LocalProvider"]
