"""Store, list and delete users' own provider keys, and read them for calls and runtime services."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from aijobs.credentials.store import Credential, CredentialStore
from aijobs.credentials.vault import Place, SealedKey
from aijobs.db.clock import Clock
from aijobs.db.database import Database
from aijobs.db.steps import Steps
from aijobs.definitions.definition import USER_DEEPSEEK_KEY, USER_MODES
from aijobs.errors import ApiError, InputInvalid, JobError
from aijobs.ids import new_id
from aijobs.jobs.lease import HeldJob
from aijobs.jobs.users import ensure_user_row, lock_user_row
from aijobs.logs import fault, get_logger
from aijobs.texts import line_fault

logger = get_logger(__name__)

MOST_CREDENTIALS = 10
MAX_LABEL = 100
MIN_KEY, MAX_KEY = 8, 512
DEFAULT_LABEL = "DeepSeek"


@dataclass(frozen=True)
class ResolvedKey:
    """A decrypted key, for a runtime service."""

    credential_id: str
    user_id: str
    mode: str
    api_key: str = field(repr=False)


class CredentialService:
    """Opens the transactions. Raises `ApiError` if it refuses a request. No error text holds a key."""

    def __init__(self, database: Database, clock: Clock, store: CredentialStore) -> None:
        self._database, self._clock, self._store = database, clock, store

    def create(self, user_id: str, key: Any, label: Any = DEFAULT_LABEL, mode: Any = USER_DEEPSEEK_KEY) -> Credential:
        """Store a key of this user. `InputInvalid` names `key`, `label` or `mode`; QUOTA_EXCEEDED beyond ten keys."""
        _check(key, label, mode)
        ensure_user_row(self._database, self._clock, user_id)
        place = Place(new_id(), user_id, mode)

        def add(session: Session) -> Credential:
            lock_user_row(session, user_id)
            used = len(self._store.find_own(session, user_id))
            if used >= MOST_CREDENTIALS:
                details = {"limit": "credentials", "used": used, "allowed": MOST_CREDENTIALS}
                raise ApiError("QUOTA_EXCEEDED", details)
            return self._store.add(session, place, label, key)

        return self._database.write(add, confirm=lambda session: self._store.find(session, place.credential_id))

    def list_own(self, user_id: str) -> list[Credential]:
        """Return a user's credentials, newest first; at most ten."""
        with self._database.read() as session:
            return self._store.find_own(session, user_id)

    def delete(self, user_id: str, credential_id: str) -> None:
        """Delete a user's credential. NOT_FOUND for none, and for another user's.

        Jobs that wait for a worker then fail with CREDENTIAL_NOT_FOUND; a running call goes on. Final jobs lose their
        reference to it first, in transactions of limited size.
        """

        def remove(session: Session) -> bool:
            lock_user_row(session, user_id)
            return self._store.delete(session, user_id, credential_id)

        def confirm(session: Session) -> bool | None:
            return True if self._store.find(session, credential_id) is None else None

        def let_go(session: Session) -> bool:
            return self._store.let_go_of_ended(session, user_id, credential_id)

        steps = Steps(self._database)
        while steps.write(let_go):
            pass
        if not self._database.write(remove, confirm):
            raise ApiError("NOT_FOUND")

    def find_sealed(self, session: Session, job: HeldJob) -> SealedKey | None:
        """Return the encrypted key of a job; see `CredentialStore.find_sealed`."""
        return self._store.find_sealed(session, job)

    def note_use(self, sealed: SealedKey) -> None:
        """Record the use of a key, once an hour. Doesn't raise."""
        if sealed.used_lately:
            return
        try:
            self._database.write(lambda session: self._store.note_use(session, sealed.credential_id))
        except SQLAlchemyError as error:  # An exhausted pool raises no DBAPIError.
            logger.warning("credential.use_unnoted", **fault(error))

    def resolve(self, credential_id: str) -> ResolvedKey:
        """Return the decrypted key, of any user. NOT_FOUND; CREDENTIAL_UNREADABLE if it can't be decrypted."""
        with self._database.read() as session:
            credential = self._store.find(session, credential_id)
            sealed = None
            if credential is not None:
                sealed = self._store.seal_of(session, credential_id, credential.user_id, credential.mode)
        if credential is None or sealed is None:
            raise ApiError("NOT_FOUND")
        try:
            api_key = sealed.open()
        except JobError as error:
            logger.warning("credential.unreadable", credentialId=credential_id, why=error.internal)
            raise ApiError(error.code) from None
        self.note_use(sealed)
        return ResolvedKey(credential_id, credential.user_id, credential.mode, api_key)

    def check_ring(self) -> None:
        """Raise `SettingsError` if stored keys need a key that the ring doesn't hold. Otherwise users' jobs would fail
        one by one.
        """
        with self._database.read() as session:
            self._store.check_ring(session)


def _check(key: Any, label: Any, mode: Any) -> None:
    faults = [("key", fault) for fault in (_key_fault(key),) if fault]
    faults += [("label", fault) for fault in (_label_fault(label, key),) if fault]
    if mode not in USER_MODES:
        faults.append(("mode", f"is one of {', '.join(USER_MODES)}"))
    if faults:
        raise InputInvalid(faults)


def _key_fault(key: Any) -> str | None:
    """Return why a value can't be a provider's key, without the value."""
    if not isinstance(key, str):
        return "must be a text"
    if not MIN_KEY <= len(key) <= MAX_KEY:
        return f"has {MIN_KEY}–{MAX_KEY} characters"
    if not all("!" <= character <= "~" for character in key):
        return "is printable ASCII without spaces"
    return None


def _label_fault(label: Any, key: Any) -> str | None:
    if not isinstance(label, str):
        return "must be a text"
    if fault := line_fault(label, MAX_LABEL):
        return fault
    if isinstance(key, str) and len(key) >= MIN_KEY and key in label:
        return "holds the key"  # It is shown, and stored as it is.
    return None
