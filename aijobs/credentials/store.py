"""The rows of users' own keys, in the caller's session. Keys leave this module encrypted only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from operator import not_
from typing import Annotated

from pydantic import Field, WithJsonSchema, computed_field
from sqlalchemy import Update, delete, func, or_, select, update
from sqlalchemy.orm import Session

from aijobs.answers import Answer, Maybe, Time, one_of
from aijobs.credentials.models import UserModelCredential
from aijobs.credentials.vault import CredentialVault, Place, Sealed, SealedKey
from aijobs.db.clock import Clock, read_clock
from aijobs.db.statements import change_rows
from aijobs.definitions.definition import USER_MODES
from aijobs.errors import SettingsError
from aijobs.jobs.lease import HeldJob
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import FINAL

USE_NOTED_EVERY = timedelta(hours=1)
ENDED_AT_ONCE = 100
"""Maximum final jobs per transaction that lose their reference to a credential."""


_UNREADABLE = {"const": True, "description": "The key can't be decrypted any more. Store it again."}


@dataclass(frozen=True)
class Credential(Answer):
    """A stored key for its user, without the key itself."""

    id: Annotated[str, Field(serialization_alias="credentialId")]
    user_id: Annotated[str, Field(exclude=True)]
    mode: Annotated[str, one_of(USER_MODES)]
    label: str
    last_four: str
    fingerprint: Annotated[str, Field(description="Equal for equal keys of yours.")]
    created_at: Time
    last_used_at: Annotated[Maybe[Time], Field(description="To the hour.")]
    readable: Annotated[bool, Field(exclude=True)] = True

    @computed_field(exclude_if=not_)  # type: ignore[prop-decorator]
    @property
    def unreadable(self) -> Annotated[bool, WithJsonSchema(_UNREADABLE)]:
        """Whether the key can't be decrypted. Jobs that name it fail with CREDENTIAL_UNREADABLE."""
        return not self.readable


@dataclass(frozen=True)
class StoredKey:
    """A row for the rotation."""

    place: Place
    sealed: Sealed


_NAMES = tuple(name for name in Credential.__dataclass_fields__ if name != "readable")
_SHOWN = tuple(getattr(UserModelCredential, name) for name in _NAMES)
_SEALED = (
    UserModelCredential.id,
    UserModelCredential.user_id,
    UserModelCredential.mode,
    UserModelCredential.key_id,
    UserModelCredential.ciphertext,
)


class CredentialStore:
    """Reads and writes users' keys. `vault` encrypts and decrypts them."""

    def __init__(self, clock: Clock, vault: CredentialVault) -> None:
        self._clock, self.vault = clock, vault

    # --- a user's own ------------------------------------------------------------------------------------------

    def add(self, session: Session, place: Place, label: str, api_key: str) -> Credential:
        """Store a key, encrypted for its row."""
        sealed = self.vault.seal(api_key, place)
        row = UserModelCredential(
            id=place.credential_id,
            user_id=place.user_id,
            mode=place.mode,
            label=label,
            last_four=api_key[-4:],
            fingerprint=self.vault.fingerprint(api_key, place.user_id),
            key_id=sealed.key_id,
            ciphertext=sealed.ciphertext,
            created_at=read_clock(session, self._clock),
        )
        session.add(row)
        session.flush()
        return Credential(**{name: getattr(row, name) for name in _NAMES})

    def find(self, session: Session, credential_id: str) -> Credential | None:
        """Return the credential with this id, of any user."""
        row = session.execute(select(*_SHOWN).where(UserModelCredential.id == credential_id)).one_or_none()
        return None if row is None else Credential(*row)

    def owns(self, session: Session, user_id: str, mode: str, credential_id: str | None) -> bool:
        """Return whether the user has a credential of this mode with this id."""
        owner = select(UserModelCredential.user_id, UserModelCredential.mode)
        row = session.execute(owner.where(UserModelCredential.id == credential_id)).one_or_none()
        return row is not None and tuple(row) == (user_id, mode)

    def find_own(self, session: Session, user_id: str) -> list[Credential]:
        """Return a user's credentials, newest first. Each is checked by decrypting it."""
        mine = UserModelCredential.user_id == user_id
        order = (UserModelCredential.created_at.desc(), UserModelCredential.id.desc())
        sealed = (UserModelCredential.key_id, UserModelCredential.ciphertext)
        rows = session.execute(select(*_SHOWN, *sealed).where(mine).order_by(*order))
        return [self._tried(Credential(*row[:-2]), Sealed(*row[-2:])) for row in rows]

    def _tried(self, credential: Credential, sealed: Sealed) -> Credential:
        place = Place(credential.id, credential.user_id, credential.mode)
        return credential if self.vault.opens(sealed, place) else replace(credential, readable=False)

    def delete(self, session: Session, user_id: str, credential_id: str) -> bool:
        """Delete a user's credential and return whether there was one. The caller holds the user's row.

        First its jobs lose their reference: the foreign key alone would lock the credential before its jobs, against
        the lock order. Final jobs have lost theirs by `let_go_of_ended`, so only a user's open jobs are locked here.
        """
        change_rows(session, _letting_go(user_id, credential_id))
        own = delete(UserModelCredential).where(
            UserModelCredential.id == credential_id, UserModelCredential.user_id == user_id
        )
        return change_rows(session, own) == 1

    def let_go_of_ended(self, session: Session, user_id: str, credential_id: str) -> bool:
        """Remove the reference to a credential from some of a user's final jobs. Return whether there may be more of
        them.
        """
        ended = (AiJob.credential_id == credential_id, AiJob.user_id == user_id, AiJob.lifecycle_status.in_(FINAL))
        found = session.execute(select(AiJob.id).where(*ended).order_by(AiJob.id).limit(ENDED_AT_ONCE)).scalars().all()
        if found:
            change_rows(session, _letting_go(user_id, credential_id).where(AiJob.id.in_(found)))
        return len(found) == ENDED_AT_ONCE

    # --- a job's -----------------------------------------------------------------------------------------------

    def find_sealed(self, session: Session, job: HeldJob) -> SealedKey | None:
        """Return the key of a job, bound to its user and mode; None if it was deleted, or if there is none.

        It isn't decrypted here: a row that can't be says so when it is opened.
        """
        if job.credential_id is None:
            return None
        return self.seal_of(session, job.credential_id, job.user_id, job.credential_mode)

    def seal_of(self, session: Session, credential_id: str, user_id: str, mode: str) -> SealedKey | None:
        """Return the key of a row, as stored by `user_id` for `mode`: another's can't be decrypted. None without such a
        row.
        """
        lately = UserModelCredential.last_used_at > self._clock.now(-USE_NOTED_EVERY)
        query = select(UserModelCredential.key_id, UserModelCredential.ciphertext, func.coalesce(lately, False))
        row = session.execute(query.where(UserModelCredential.id == credential_id)).one_or_none()
        if row is None:
            return None
        key_id, ciphertext, used_lately = row
        place = Place(credential_id, user_id, mode)
        return SealedKey(self.vault, Sealed(key_id, ciphertext), place, used_lately=bool(used_lately))

    def note_use(self, session: Session, credential_id: str) -> None:
        """Record a use, unless one within the last hour is recorded."""
        used = UserModelCredential.last_used_at
        stale = or_(used.is_(None), used <= self._clock.now(-USE_NOTED_EVERY))
        noted = update(UserModelCredential).where(UserModelCredential.id == credential_id, stale)
        change_rows(session, noted.values(last_used_at=self._clock.now()))

    # --- the ring ----------------------------------------------------------------------------------------------

    def count_missing(self, session: Session) -> dict[str, int]:
        """Return the number of rows that need a key that the ring doesn't hold, by the key's id."""
        key_id = UserModelCredential.key_id
        query = select(key_id, func.count()).where(key_id.not_in(self.vault.key_ids)).group_by(key_id).order_by(key_id)
        return {row[0]: row[1] for row in session.execute(query)}

    def check_ring(self, session: Session) -> None:
        """Raise `SettingsError` if stored keys need a key that the ring doesn't hold."""
        if missing := self.count_missing(session):
            needed = ", ".join(f"{key_id!r} ({count})" for key_id, count in missing.items())
            total = sum(missing.values())
            raise SettingsError(
                f"AIJOBS_CREDENTIAL_KEYS lacks what {total} stored user key{'s' * (total != 1)} need"
                f"{'s' * (total == 1)}: {needed}; put it back behind the newest"
            )

    def count_old(self, session: Session) -> int:
        """Return the number of rows that don't use the ring's newest key."""
        old = UserModelCredential.key_id != self.vault.current_key_id
        return session.execute(select(func.count()).select_from(UserModelCredential).where(old)).scalar_one()

    def find_old(self, session: Session, behind: str, limit: int) -> list[StoredKey]:
        """Return the next rows that don't use the ring's newest key, ordered by id, after the id `behind`."""
        old = UserModelCredential.key_id != self.vault.current_key_id
        query = select(*_SEALED).where(old, UserModelCredential.id > behind)
        rows = session.execute(query.order_by(UserModelCredential.id).limit(limit))
        return [StoredKey(Place(*row[:3]), Sealed(*row[3:])) for row in rows]

    def replace(self, session: Session, stored: StoredKey, fresh: Sealed) -> bool:
        """Replace the ciphertext that was read by `fresh`, unless the row was changed meanwhile. Return whether it is
        there.
        """
        this_row = UserModelCredential.id == stored.place.credential_id
        as_read = (
            UserModelCredential.key_id == stored.sealed.key_id,
            UserModelCredential.ciphertext == stored.sealed.ciphertext,
        )
        change = update(UserModelCredential).where(this_row, *as_read)
        if change_rows(session, change.values(key_id=fresh.key_id, ciphertext=fresh.ciphertext)):
            return True
        # This write may have taken effect before, if only the answer to its COMMIT was lost.
        there = session.execute(select(UserModelCredential.ciphertext).where(this_row)).scalar_one_or_none()
        return there == fresh.ciphertext


def _letting_go(user_id: str, credential_id: str) -> Update:
    """Build the UPDATE that removes the reference to a credential from its user's jobs.

    It changes no state, holder or plan of a job, so it isn't part of the history: `event_seq` stays.
    """
    named = (AiJob.credential_id == credential_id, AiJob.user_id == user_id)
    return update(AiJob).where(*named).values(credential_id=None)
