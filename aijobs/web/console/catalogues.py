"""`python -m aijobs.web.console.catalogues`: collect all texts of code and templates in both catalogues.

English texts are their own translation. Missing Chinese ones are listed, and the exit code is 1 until they are written.
The compiled catalogues are written beside their sources.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.extract import DEFAULT_KEYWORDS, extract_from_dir
from babel.messages.frontend import parse_mapping_cfg
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

from aijobs.settings import CHECKOUT, PACKAGE

LANGUAGES = ("en", "zh")
_NEVER = datetime(2026, 1, 1, tzinfo=UTC)
KEYWORDS = {**DEFAULT_KEYWORDS, "_l": None, "_n": None, "_lp": ((1, "c"), 2), "lazy_gettext": None}


def po_path(language: str) -> Path:
    """Return the path of a language's catalogue source."""
    return PACKAGE / "translations" / language / "LC_MESSAGES" / "messages.po"


def extract(root: Path = CHECKOUT) -> Catalog:
    """Collect every text that code and templates translate."""
    with open(root / "babel.cfg", encoding="utf-8") as file:
        methods, options = parse_mapping_cfg(file)
    catalog = Catalog(project="aijobs", charset="utf-8", fuzzy=False)
    found = extract_from_dir(
        str(root), methods, options, keywords=KEYWORDS, directory_filter=lambda path: not _is_foreign(Path(path))
    )
    for filename, line, message, _comments, context in found:
        catalog.add(message, locations=[(filename, line)], context=context)
    return catalog


def read(language: str) -> Catalog:
    """Read the catalogue from disk; an empty one if there is none."""
    path = po_path(language)
    if not path.exists():
        return Catalog(locale=language, charset="utf-8", fuzzy=False)
    with open(path, "rb") as file:
        return read_po(file, locale=language)


def untranslated(catalog: Catalog) -> list[str]:
    """Return the texts of `catalog` without a translation, or with one that nobody has checked."""
    return [
        str(message.id) for message in catalog if message.id and (message.fuzzy or not all(_strings(message.string)))
    ]


def update(language: str, texts: Catalog) -> Catalog:
    """Update a language's catalogue to `texts` and write both of its files."""
    catalog = read(language)
    # A copy, because `update` keeps the message objects.
    catalog.update(deepcopy(texts), no_fuzzy_matching=True)
    catalog.obsolete.clear()
    # No date and no author: the same texts give the same file.
    catalog.header_comment = f"# The texts of aijobs: {language}."
    catalog.creation_date = catalog.revision_date = _NEVER
    catalog.project, catalog.version, catalog.last_translator = "aijobs", "1", "aijobs"
    catalog.msgid_bugs_address = catalog.language_team = "aijobs"
    if language == "en":
        for message in catalog:
            if message.id:
                message.string = message.id
    path = po_path(language)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        write_po(file, catalog, width=110, sort_output=True, include_lineno=False, omit_header=False)
    with open(path.with_suffix(".mo"), "wb") as file:
        write_mo(file, catalog)
    return catalog


def _strings(value: str | tuple[str, ...] | list[str] | None) -> tuple[str, ...]:
    return (value or "",) if isinstance(value, str | None) else tuple(value)


def _is_foreign(path: Path) -> bool:
    return path.name.startswith((".", "_")) or path.name in ("tests", "bench", "migrations", "instance", "docs")


def main() -> int:
    """Update all catalogues. Return 1 if a translation is missing."""
    texts = extract()
    lacking = {language: untranslated(update(language, texts)) for language in LANGUAGES}
    for language, messages in lacking.items():
        for message in messages:
            sys.stderr.write(f"{language}: {message}\n")
    return 1 if any(lacking.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
