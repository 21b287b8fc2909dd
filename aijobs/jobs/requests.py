"""A request for a job: its shape, its checks, and the hash that distinguishes requests."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from pydantic import ValidationError

from aijobs.canonical import canonical_bytes, find_faults, identifier_fault, json_name
from aijobs.definitions.definition import PLATFORM_KEY, JobDefinition
from aijobs.errors import InputInvalid
from aijobs.jobs.models import AiJob
from aijobs.queues.message import OutgoingMessage
from aijobs.settings import KeyRing
from aijobs.validation import Location, find_schema_faults

UnavailableFor = Callable[[JobDefinition, str, str | None], timedelta | None]
"""Return how long no provider is available for a job of this definition, credential mode and id; None if one is."""


@dataclass(frozen=True)
class Overrides:
    """Values that replace a definition's defaults. Each is checked like its default."""

    priority: int | None = None
    credential_mode: str | None = None
    credential_id: str | None = None
    prompt_version: str | None = None
    output_schema_version: str | None = None


@dataclass(frozen=True)
class CreateJobInput:
    """A request for a job, as a business service makes it."""

    user_id: str
    job_type: str
    target_type: str
    target_id: str
    input: Mapping[str, Any] = field(repr=False)
    idempotency_key: str | None = None
    overrides: Overrides = Overrides()


@dataclass(frozen=True)
class CreatedJob:
    """A job, and whether this request created it or found it."""

    job: AiJob
    created: bool
    message: OutgoingMessage | None = field(default=None, repr=False)
    """The broker message of a job that was created, if its enqueue event still waits."""


def can_have_led_to_a_job(request: CreateJobInput) -> bool:
    """Return whether there is a key, and key and user id can be stored. Not every database can look up others."""
    key = request.idempotency_key
    return key is not None and identifier_fault(key) is None and identifier_fault(request.user_id) is None


def check_request(request: CreateJobInput) -> None:
    """Raise `InputInvalid` naming each invalid identifier, and each part of the input that can't be stored."""
    named = {"userId": request.user_id, "targetType": request.target_type, "targetId": request.target_id}
    if request.idempotency_key is not None:
        named["Idempotency-Key"] = request.idempotency_key
    faults = [(name, fault) for name, value in named.items() if (fault := identifier_fault(value))]
    if len(request.target_type) > 64:
        faults.append(("targetType", "has 1–64 characters"))
    faults += find_faults(request.input)
    faults += [(json_name(name), fault) for name, fault in find_faults(vars(request.overrides))]
    if faults:
        raise InputInvalid(faults)


def validated_input(definition: JobDefinition, received: Mapping[str, Any]) -> dict[str, Any]:
    """Return the input after its schema. `InputInvalid` names each field that is wrong."""
    try:
        model = definition.input.schema.model_validate(dict(received))
    except ValidationError as error:
        raise InputInvalid([(_path(place), fault) for place, fault in find_schema_faults(error)]) from None
    return model.model_dump(mode="json", by_alias=True)


def _path(location: Location) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path or "(body)"


@dataclass(frozen=True)
class Terms:
    """What a new job runs under: the definition's defaults, with the request's overrides."""

    priority: int
    credential_mode: str
    credential_id: str | None
    prompt_version: str | None
    output_schema_version: str


def agree_terms(definition: JobDefinition, overrides: Overrides, known_prompt: Any) -> Terms:
    """Return the terms for a request. `InputInvalid` names each override that the definition doesn't allow.

    `known_prompt(name, version)` returns whether a prompt exists. The owner of a credential isn't checked here.
    """
    faults = []
    priority = definition.queue.default_priority if overrides.priority is None else overrides.priority
    if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= 100:
        faults.append(("priority", "must be a whole number from 0 to 100"))
    mode = definition.credential.default_mode if overrides.credential_mode is None else overrides.credential_mode
    if mode not in definition.credential.allowed_modes:
        faults.append(("credentialMode", f"must be one of {', '.join(definition.credential.allowed_modes)}"))
    if mode == PLATFORM_KEY and overrides.credential_id is not None:
        faults.append(("credentialId", "is only allowed with the user's own key"))
    if mode != PLATFORM_KEY and not isinstance(overrides.credential_id, str):
        faults.append(("credentialId", "must be the id of the user's own key"))
    prompt = definition.prompt.version if definition.prompt else None
    if overrides.prompt_version is not None:
        prompt = overrides.prompt_version
        if definition.prompt is None or not known_prompt(definition.prompt.name, prompt):
            faults.append(("promptVersion", "is no prompt version of this job type"))
    output = definition.output.schema_version
    if overrides.output_schema_version not in (None, output):
        faults.append(("outputSchemaVersion", f"must be {definition.output.schema_version}"))
    if faults:
        raise InputInvalid(faults)
    return Terms(priority, mode, overrides.credential_id, prompt, output)


def request_hash(request: CreateJobInput, keys: KeyRing, key_id: str | None = None) -> str | None:
    """Return `{key id}:{HMAC-SHA-256}` over the request as received: input, target and overrides.

    None if `key_id` is no longer in the ring: then the request counts as a different one.
    """
    if key_id is None:
        key_id = keys.current[0]
    secret = keys.get(key_id)
    if secret is None:
        return None
    return f"{key_id}:{hmac.new(secret, canonical_bytes(_received(request)), hashlib.sha256).hexdigest()}"


def _received(request: CreateJobInput) -> dict[str, Any]:
    return {
        "input": request.input,
        "targetType": request.target_type,
        "targetId": request.target_id,
        "overrides": {name: value for name, value in vars(request.overrides).items() if value is not None},
    }


def is_same_request(request: CreateJobInput, stored_hash: str | None, keys: KeyRing) -> bool:
    """Return whether `request` is the one whose hash was stored. A request that can't be stored never is."""
    if stored_hash is None or any(find_faults(_received(request))):
        return False
    again = request_hash(request, keys, stored_hash.partition(":")[0])
    return again is not None and hmac.compare_digest(again, stored_hash)
