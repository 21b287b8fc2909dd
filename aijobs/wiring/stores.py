"""Build the stores of this process."""

from __future__ import annotations

from aijobs.credentials.store import CredentialStore
from aijobs.credentials.vault import CredentialVault
from aijobs.db.clock import Clock
from aijobs.settings import Settings


def build_credential_store(settings: Settings, clock: Clock) -> CredentialStore:
    """Build the store of users' own keys, with the ring of the settings."""
    return CredentialStore(clock, CredentialVault(settings.credential_keys, settings.secret_key))
