"""A stored key can be decrypted only unchanged, in its own row, with its own key of the ring."""

from __future__ import annotations

import copy
import hashlib
import hmac
import pickle
import traceback
from dataclasses import replace

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from aijobs.credentials.vault import NONCE_BYTES, TAG_BYTES, VERSION, CredentialVault, Place, Sealed, SealedKey
from aijobs.errors import JobError, SettingsError
from aijobs.settings import KeyRing

API_KEY = "sk-canary-0123456789abcdef"
PLACE = Place("01a22808-71a2-74b1-94c0-8cb6e2e7a3b2", "Müller|mode:x", "user_deepseek_key")
K1, K2 = ("k1", b"1" * 32), ("k2", b"2" * 32)
SECRET = "s" * 32


def vault(*keys: tuple[str, bytes], secret_key: str = SECRET) -> CredentialVault:
    return CredentialVault(KeyRing(keys or (K1,)), secret_key)


def refusal(opened_by: CredentialVault, sealed: Sealed, place: Place = PLACE) -> str:
    """Return the refusal's internal text; assert that it holds neither the key nor secrets of the ring."""
    with pytest.raises(JobError) as caught:
        opened_by.open(sealed, place)
    assert caught.value.code == "CREDENTIAL_UNREADABLE"
    text = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + caught.value.internal
    assert API_KEY not in text
    assert "1" * 32 not in text
    assert place.credential_id in caught.value.internal
    return caught.value.internal


def test_key_sealed_for_a_row_opens_there() -> None:
    sealed = vault().seal(API_KEY, PLACE)
    assert sealed.key_id == "k1"
    assert API_KEY.encode() not in sealed.ciphertext
    assert vault().open(sealed, PLACE) == API_KEY


def test_ciphertext_has_the_documented_format() -> None:
    sealed = vault().seal(API_KEY, PLACE)
    assert sealed.ciphertext[:1] == VERSION == b"\x01"
    assert len(sealed.ciphertext) == 1 + 12 + len(API_KEY) + 16
    key = HKDF(SHA256(), 32, salt=None, info=b"aijobs|v1|credential-cipher").derive(b"1" * 32)
    bound = f"aijobs|v1|cred:{PLACE.credential_id}|user:{PLACE.user_id}|mode:{PLACE.mode}".encode()
    assert AESGCM(key).decrypt(sealed.ciphertext[1:13], sealed.ciphertext[13:], bound).decode() == API_KEY


@pytest.mark.parametrize("field", ["credential_id", "user_id", "mode"])
def test_key_copied_to_another_row_user_or_mode_does_not_open(field: str) -> None:
    sealed = vault().seal(API_KEY, PLACE)
    for other in (getattr(PLACE, field) + "x", getattr(PLACE, field).upper(), ""):
        assert "another row's" in refusal(vault(), sealed, replace(PLACE, **{field: other}))


def test_key_of_a_user_does_not_open_for_a_look_alike_name() -> None:
    sealed = vault().seal(API_KEY, replace(PLACE, user_id="Müller"))
    assert refusal(vault(), sealed, replace(PLACE, user_id="Mu\u0308ller"))


def test_ciphertext_with_any_changed_bit_does_not_open() -> None:
    sealed = vault().seal(API_KEY, PLACE)
    version, tag = 1, len(sealed.ciphertext) - TAG_BYTES
    places = {
        "version": range(version),
        "nonce": range(version, version + NONCE_BYTES),
        "text": range(version + NONCE_BYTES, tag),
        "tag": range(tag, len(sealed.ciphertext)),
    }
    for part, indexes in places.items():
        for index in indexes:
            for bit in (0x01, 0x80):
                changed = bytearray(sealed.ciphertext)
                changed[index] ^= bit
                why = refusal(vault(), replace(sealed, ciphertext=bytes(changed)))
                assert ("version" if part == "version" else "was changed") in why


def test_truncated_or_extended_ciphertext_does_not_open() -> None:
    whole = vault().seal(API_KEY, PLACE).ciphertext
    for length in range(len(whole)):
        assert refusal(vault(), Sealed("k1", whole[:length]))
    assert "cut off: 0 bytes" in refusal(vault(), Sealed("k1", b""))
    assert refusal(vault(), Sealed("k1", whole + b"\x00"))
    assert refusal(vault(), Sealed("k1", whole[:1] + whole))


def test_missing_ring_key_is_named_without_its_secret() -> None:
    sealed = vault(K1).seal(API_KEY, PLACE)
    assert "'k1', which AIJOBS_CREDENTIAL_KEYS doesn't hold" in refusal(vault(K2), sealed)
    assert "another key named 'k1'" in refusal(vault(("k1", b"9" * 32)), sealed)
    assert refusal(vault(K2, K1), replace(sealed, key_id="k2"))


def test_first_ring_key_seals_and_every_ring_key_opens() -> None:
    old = vault(K1).seal(API_KEY, PLACE)
    both = vault(K2, K1)
    assert both.key_ids == ("k2", "k1")
    assert both.open(old, PLACE) == API_KEY
    new = both.seal(API_KEY, PLACE)
    assert new.key_id == "k2"
    assert vault(K2).open(new, PLACE) == API_KEY


def test_empty_ring_seals_nothing() -> None:
    with pytest.raises(SettingsError, match="AIJOBS_CREDENTIAL_KEYS"):
        CredentialVault(KeyRing(()), SECRET).seal(API_KEY, PLACE)


def test_nonces_and_ciphertexts_are_never_repeated() -> None:
    made = {vault().seal(API_KEY, PLACE).ciphertext for _ in range(2000)}
    assert len({ciphertext[1:13] for ciphertext in made}) == len({ciphertext[13:] for ciphertext in made}) == 2000


def test_same_secret_gives_different_keys_for_cipher_and_fingerprint() -> None:
    """If somebody sets one secret for everything, fingerprints must not be made with the cipher's key."""
    same = vault(("k1", SECRET.encode()), secret_key=SECRET)
    sealed = same.seal(API_KEY, PLACE)
    with pytest.raises(InvalidTag):
        AESGCM(SECRET.encode()).decrypt(sealed.ciphertext[1:13], sealed.ciphertext[13:], PLACE.bound)
    direct = hmac.new(SECRET.encode(), f"u1\0{API_KEY}".encode(), hashlib.sha256).hexdigest()
    assert not direct.startswith(same.fingerprint(API_KEY, "u1"))


def test_fingerprint_differs_by_key_and_user_and_does_not_depend_on_the_ring() -> None:
    print_of = vault(K1).fingerprint(API_KEY, "u1")
    assert len(print_of) == 16
    assert vault(K2).fingerprint(API_KEY, "u1") == print_of
    others = {
        vault().fingerprint(API_KEY + "0", "u1"),
        vault().fingerprint(API_KEY, "u2"),
        vault(secret_key="t" * 32).fingerprint(API_KEY, "u1"),
        hashlib.sha256(API_KEY.encode()).hexdigest()[:16],
    }
    assert len(others) == 4
    assert print_of not in others


def test_sealed_key_shows_nothing_and_is_decrypted_at_each_use() -> None:
    sealed = SealedKey(vault(), vault().seal(API_KEY, PLACE), PLACE)
    assert (repr(sealed), str(sealed)) == ("SealedKey()", "SealedKey()")
    assert sealed.credential_id == PLACE.credential_id
    assert sealed.open() == sealed.open() == API_KEY
    assert API_KEY not in str([getattr(sealed, name) for name in SealedKey.__slots__])
    for leave in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="stays in its process"):
            leave(sealed)
    assert b"1" * 32 not in repr(vault()).encode()
    assert repr(vault().seal(API_KEY, PLACE)) == "Sealed(key_id='k1')"
