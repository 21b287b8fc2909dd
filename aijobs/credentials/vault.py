"""Users' own provider keys, encrypted: AES-256-GCM under a ring of keys, each bound to the row that it stands in.

A ciphertext is a version byte, a random nonce of 96 bits and what AES-GCM makes, tag included. Which key of the ring
made it stands beside it. The key of the cipher is derived from the ring's secret, so that the same secret used
elsewhere would give another key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from aijobs.errors import JobError, SettingsError
from aijobs.settings import KeyRing

UNREADABLE = "CREDENTIAL_UNREADABLE"
VERSION = b"\x01"
NONCE_BYTES, TAG_BYTES = 12, 16
FINGERPRINT_DIGITS = 16
_CIPHER_INFO = b"aijobs|v1|credential-cipher"
_FINGERPRINT_INFO = b"aijobs|v1|credential-fingerprint"


@dataclass(frozen=True, slots=True)
class Place:
    """The row that a key stands in: in any other one its ciphertext doesn't open."""

    credential_id: str
    user_id: str
    mode: str

    @property
    def bound(self) -> bytes:
        """What AES-GCM authenticates beside the key (its additional data)."""
        return f"aijobs|v1|cred:{self.credential_id}|user:{self.user_id}|mode:{self.mode}".encode()


@dataclass(frozen=True, slots=True)
class Sealed:
    """An encrypted key and the id of the ring's key that it is encrypted with."""

    key_id: str
    ciphertext: bytes = field(repr=False)


class CredentialVault:
    """Encrypts and decrypts under a ring: the first key seals, every key of the ring opens what it sealed."""

    def __init__(self, ring: KeyRing, secret_key: str) -> None:
        """`secret_key` is what fingerprints are keyed with: they outlive every key of the ring."""
        self._ciphers = {key_id: AESGCM(_derive(secret, _CIPHER_INFO)) for key_id, secret in ring.keys}
        self._key_ids = tuple(self._ciphers)
        self._fingerprint_key = _derive(secret_key.encode(), _FINGERPRINT_INFO)

    @property
    def key_ids(self) -> tuple[str, ...]:
        """The ids of the ring's keys, newest first."""
        return self._key_ids

    @property
    def current_key_id(self) -> str:
        """The key that seals now. `SettingsError` where the ring is empty."""
        if not self._key_ids:
            raise SettingsError("AIJOBS_CREDENTIAL_KEYS holds no key")
        return self._key_ids[0]

    def seal(self, api_key: str, place: Place) -> Sealed:
        """`api_key` encrypted for its row, under the ring's first key and a fresh nonce."""
        key_id = self.current_key_id
        nonce = os.urandom(NONCE_BYTES)
        return Sealed(key_id, VERSION + nonce + self._ciphers[key_id].encrypt(nonce, api_key.encode(), place.bound))

    def open(self, sealed: Sealed, place: Place) -> str:
        """The key that was sealed for this row. `JobError` CREDENTIAL_UNREADABLE, which says why, for anything else."""
        cipher = self._ciphers.get(sealed.key_id)
        if cipher is None:
            raise _unreadable(place, f"it needs the key {sealed.key_id!r}, which AIJOBS_CREDENTIAL_KEYS doesn't hold")
        data = sealed.ciphertext
        if len(data) <= len(VERSION) + NONCE_BYTES + TAG_BYTES:
            raise _unreadable(place, f"its ciphertext is cut off: {len(data)} bytes")
        if data[: len(VERSION)] != VERSION:
            raise _unreadable(place, f"its ciphertext is of a version that this program doesn't know: {data[0]}")
        nonce, encrypted = data[len(VERSION) :][:NONCE_BYTES], data[len(VERSION) + NONCE_BYTES :]
        try:
            return cipher.decrypt(nonce, encrypted, place.bound).decode()
        except InvalidTag:
            why = f"its ciphertext was changed, is another row's, or was made by another key named {sealed.key_id!r}"
            raise _unreadable(place, why) from None

    def opens(self, sealed: Sealed, place: Place) -> bool:
        """Whether `open` would succeed."""
        try:
            self.open(sealed, place)
        except JobError:
            return False
        return True

    def fingerprint(self, api_key: str, user_id: str) -> str:
        """16 hex digits by which a user tells keys apart: equal for equal keys of one user, whatever the ring is.

        Keyed, so that who holds the table can't try keys; per user, so that two users' rows never look alike.
        """
        message = user_id.encode() + b"\x00" + api_key.encode()  # A user id holds no control character.
        return hmac.new(self._fingerprint_key, message, hashlib.sha256).hexdigest()[:FINGERPRINT_DIGITS]


class SealedKey:
    """A user's key on its way to a call: decrypted when it is opened, and kept nowhere."""

    __slots__ = ("_place", "_sealed", "_vault", "used_lately")

    def __init__(self, vault: CredentialVault, sealed: Sealed, place: Place, *, used_lately: bool = False) -> None:
        self._vault, self._sealed, self._place = vault, sealed, place
        self.used_lately = used_lately
        """Whether a use within the last hour is on record."""

    @property
    def credential_id(self) -> str:
        return self._place.credential_id

    def open(self) -> str:
        """The key in clear, for one call. `JobError` CREDENTIAL_UNREADABLE."""
        return self._vault.open(self._sealed, self._place)

    def __repr__(self) -> str:
        return "SealedKey()"

    def __reduce__(self) -> str:
        raise TypeError("a sealed key stays in its process")


def _derive(secret: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(secret)


def _unreadable(place: Place, why: str) -> JobError:
    return JobError(UNREADABLE, f"credential {place.credential_id} can't be decrypted: {why}")
