"""Encrypt users' own provider keys: AES-256-GCM with a ring of keys, each ciphertext bound to its row.

A ciphertext is a version byte, a random nonce of 96 bits, and the output of AES-GCM with its tag. The row also holds
the id of the ring's key. The cipher's key is derived from the ring's secret, so that the same secret used elsewhere
gives another key.
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
    """The row of a key. In any other row its ciphertext can't be decrypted."""

    credential_id: str
    user_id: str
    mode: str

    @property
    def bound(self) -> bytes:
        """The additional data that AES-GCM authenticates."""
        return f"aijobs|v1|cred:{self.credential_id}|user:{self.user_id}|mode:{self.mode}".encode()


@dataclass(frozen=True, slots=True)
class Sealed:
    """A ciphertext and the id of the ring's key that encrypted it."""

    key_id: str
    ciphertext: bytes = field(repr=False)


class CredentialVault:
    """Encrypts with the first key of a ring, and decrypts with any of them."""

    def __init__(self, ring: KeyRing, secret_key: str) -> None:
        """`secret_key` is the key of fingerprints, which outlive every key of the ring."""
        self._ciphers = {key_id: AESGCM(_derive(secret, _CIPHER_INFO)) for key_id, secret in ring.keys}
        self._key_ids = tuple(self._ciphers)
        self._fingerprint_key = _derive(secret_key.encode(), _FINGERPRINT_INFO)

    @property
    def key_ids(self) -> tuple[str, ...]:
        """The ids of the ring's keys, newest first."""
        return self._key_ids

    @property
    def current_key_id(self) -> str:
        """The id of the key that encrypts now. `SettingsError` if the ring is empty."""
        if not self._key_ids:
            raise SettingsError("AIJOBS_CREDENTIAL_KEYS holds no key")
        return self._key_ids[0]

    def seal(self, api_key: str, place: Place) -> Sealed:
        """Encrypt `api_key` for its row, with the ring's first key and a new nonce."""
        key_id = self.current_key_id
        nonce = os.urandom(NONCE_BYTES)
        return Sealed(key_id, VERSION + nonce + self._ciphers[key_id].encrypt(nonce, api_key.encode(), place.bound))

    def open(self, sealed: Sealed, place: Place) -> str:
        """Decrypt the key of this row. `JobError` CREDENTIAL_UNREADABLE says why, if it can't be."""
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
        """Return whether `open` would succeed."""
        try:
            self.open(sealed, place)
        except JobError:
            return False
        return True

    def fingerprint(self, api_key: str, user_id: str) -> str:
        """Return 16 hex digits that identify a key for its user, whatever the ring is.

        Keyed, so that a reader of the table can't try keys; per user, so that two users' rows are never equal.
        """
        message = user_id.encode() + b"\x00" + api_key.encode()  # A user id holds no control character.
        return hmac.new(self._fingerprint_key, message, hashlib.sha256).hexdigest()[:FINGERPRINT_DIGITS]


class SealedKey:
    """A user's key for a call: decrypted when it is opened, and not kept."""

    __slots__ = ("_place", "_sealed", "_vault", "used_lately")

    def __init__(self, vault: CredentialVault, sealed: Sealed, place: Place, *, used_lately: bool = False) -> None:
        self._vault, self._sealed, self._place = vault, sealed, place
        self.used_lately = used_lately
        """Whether a use within the last hour is recorded."""

    @property
    def credential_id(self) -> str:
        return self._place.credential_id

    def open(self) -> str:
        """Return the decrypted key, for one call. `JobError` CREDENTIAL_UNREADABLE."""
        return self._vault.open(self._sealed, self._place)

    def __repr__(self) -> str:
        return "SealedKey()"

    def __reduce__(self) -> str:
        raise TypeError("a sealed key stays in its process")


def _derive(secret: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(secret)


def _unreadable(place: Place, why: str) -> JobError:
    return JobError(UNREADABLE, f"credential {place.credential_id} can't be decrypted: {why}")
