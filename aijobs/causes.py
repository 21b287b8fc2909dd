"""Read the cause of a database error: a word or a code, never the text, which may hold written values.

Drivers are recognised by their errors' attributes, so none needs to be imported.
"""

from __future__ import annotations

from collections.abc import Mapping

DISK_FULL, READ_ONLY, REFUSED = "disk_full", "read_only", "refused"

_WORDS: Mapping[object, str] = {
    # SQLite, by the name of the (extended) result code
    "SQLITE_FULL": DISK_FULL,
    "SQLITE_READONLY": READ_ONLY,
    # PostgreSQL, by SQLSTATE
    "53100": DISK_FULL,
    "25006": READ_ONLY,
    # MariaDB and MySQL, by number: disk full, table full, disk full within a temporary table; --read-only, a read-only
    # transaction, a server in read-only mode
    1021: DISK_FULL,
    1114: DISK_FULL,
    3: DISK_FULL,
    1290: READ_ONLY,
    1792: READ_ONLY,
    1836: READ_ONLY,
}


def cause_of(error: BaseException) -> str | None:
    """Return `disk_full`, `read_only`, or the driver's own code (`SQLITE_BUSY`, `40P01`, `1205`); None if there is
    none.
    """
    original = getattr(error, "orig", None)
    code = _code(original)
    if code is None:
        return None
    for known in (code, "_".join(str(code).split("_")[:2])):
        if known in _WORDS:
            return _WORDS[known]
    return str(code)


def stops_writes(cause: str | None) -> bool:
    """Return whether nothing can be written until somebody repairs the database."""
    return cause in (DISK_FULL, READ_ONLY)


def _code(original: object) -> object:
    first = (getattr(original, "args", None) or (None,))[0]
    if isinstance(first, int):  # MariaDB's number is more precise than its SQLSTATE.
        return first
    return getattr(original, "sqlite_errorname", None) or getattr(original, "sqlstate", None)
