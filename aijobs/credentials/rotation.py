"""Re-encrypt users' stored keys with the newest key of the ring, so that the old ones may go."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from aijobs.credentials.store import CredentialStore, StoredKey
from aijobs.credentials.vault import Sealed
from aijobs.db.database import Database
from aijobs.db.steps import Steps
from aijobs.errors import JobError

BATCH = 20


@dataclass(frozen=True)
class Rotated:
    """The result of a rotation."""

    key_id: str
    """The newest key of the ring."""
    rotated: int
    unreadable: tuple[str, ...]
    """Ids of credentials that can't be decrypted. Their rows are unchanged."""
    remaining: int
    """Rows that still need an old key. While there are any, the old keys must stay."""

    @property
    def is_complete(self) -> bool:
        return self.remaining == 0


class CredentialRotation:
    """Re-encrypts rows that don't use the newest key, one batch per transaction, in order of their ids.

    May run at any time, several times at once, and again after it was killed: finished rows aren't found again. Each
    new ciphertext is decrypted before it is written, and it replaces only the ciphertext that was read: a user who
    deletes the key meanwhile, or another rotation, wins.
    """

    def __init__(self, database: Database, store: CredentialStore, batch: int = BATCH) -> None:
        self._database, self._store, self._batch = database, store, batch
        self._steps = Steps(database)

    def run(self) -> Rotated:
        """Re-encrypt all rows once. A row that can't be decrypted is reported, and stops no other."""
        vault = self._store.vault
        rotated, unreadable, behind = 0, list[str](), ""
        while batch := self._next(behind):
            behind = batch[-1].place.credential_id
            fresh: list[tuple[StoredKey, Sealed]] = []
            for stored in batch:
                try:
                    fresh.append((stored, self._again(stored)))
                except JobError:
                    unreadable.append(stored.place.credential_id)
            rotated += self._write(fresh)
        with self._database.read() as session:
            remaining = self._store.count_old(session)
        return Rotated(vault.current_key_id, rotated, tuple(unreadable), remaining)

    def _next(self, behind: str) -> list[StoredKey]:
        with self._database.read() as session:
            return self._store.find_old(session, behind, self._batch)

    def _again(self, stored: StoredKey) -> Sealed:
        """Return the key encrypted with the newest one, and checked by decrypting it. `JobError` if it can't be."""
        vault = self._store.vault
        api_key = vault.open(stored.sealed, stored.place)
        fresh = vault.seal(api_key, stored.place)
        if vault.open(fresh, stored.place) != api_key:
            raise AssertionError("a key that was just encrypted opens as another")
        return fresh

    def _write(self, fresh: list[tuple[StoredKey, Sealed]]) -> int:
        """Write a batch, and return the number of rows that were changed."""

        def replace(session: Session) -> int:
            return sum(self._store.replace(session, stored, sealed) for stored, sealed in fresh)

        return self._steps.write(replace) if fresh else 0
