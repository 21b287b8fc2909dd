"""Why the registry refuses a job type at start-up."""

from __future__ import annotations

from aijobs.errors import AijobsError


class DefinitionError(AijobsError):
    """The registry refuses a job definition at start-up. The text names the job type and the fault."""


class DuplicateJobDefinition(DefinitionError):
    """A second definition of one job type."""


class UnknownJobType(DefinitionError):
    """No definition has this name."""


class InvalidJobType(DefinitionError):
    """The name does not match `^[a-z][a-z0-9_]{1,63}$`."""


class InvalidMetadata(DefinitionError):
    """A label, description, domain or version is missing or unknown."""


class InvalidQueue(DefinitionError):
    """The queue doesn't exist, or the priority is not 0–100."""


class InvalidTimeout(DefinitionError):
    """`timeout_ms` is not within 1,000–600,000."""


class InvalidOutputLimit(DefinitionError):
    """`max_output_tokens` is not within 1–200,000."""


class InvalidRetryPolicy(DefinitionError):
    """`max_retries`, the backoff or the abort strategy is not valid."""


class InvalidSchema(DefinitionError):
    """An input or output schema, its version or its validator is missing or of the wrong kind."""


class InvalidCredentialModes(DefinitionError):
    """The credential modes are empty or unknown, or the default is not among them."""


class InvalidField(DefinitionError):
    """Another field (security, script, rebuild, production) is of the wrong type."""


class UnknownRoute(DefinitionError):
    """The definition names a route that is not configured, or allows a credential mode whose calls have none."""


class UnknownProjector(DefinitionError):
    """The definition names a projector that nobody registered."""


class DuplicateProjector(DefinitionError):
    """A second projector with one key."""


class InvalidProjector(DefinitionError):
    """A job type's PROJECTOR has no key, or can't project."""


class UnknownPrompt(DefinitionError):
    """The definition names a prompt that does not exist."""
