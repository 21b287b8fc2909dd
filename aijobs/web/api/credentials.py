"""The API of a user's own provider keys: written once, never read again."""

from __future__ import annotations

from flask import Response

from aijobs.errors import ApiError
from aijobs.monitor.monitor import is_id
from aijobs.web.api.answers import CredentialList, answer, no_content
from aijobs.web.api.openapi import Operation
from aijobs.web.context import services
from aijobs.web.requests import read_no_parameters, read_object, read_optional_object
from aijobs.web.user_tokens import get_user_id

FIELDS = ("key", "label", "mode")
"""No URL among them: the providers file says where a key is sent."""


def create_credential() -> Response:
    read_no_parameters()
    body = read_object(FIELDS)
    created = services().credentials.create(get_user_id(), **{"key": None, **body})
    return answer(created, 201)


def list_credentials() -> Response:
    read_no_parameters()
    own = services().credentials.list_own(get_user_id())
    return answer(CredentialList(own))


def delete_credential(credential_id: str) -> Response:
    read_no_parameters()
    read_optional_object(())
    if not is_id(credential_id):
        raise ApiError("NOT_FOUND")
    services().credentials.delete(get_user_id(), credential_id)
    return no_content()


OPERATIONS = (
    Operation(
        "POST",
        "/api/ai/credentials",
        create_credential,
        "Store your own provider key; it is never shown again",
        {201: "Credential"},
        errors=(
            "BAD_REQUEST",
            "UNAUTHORIZED",
            "PAYLOAD_TOO_LARGE",
            "UNSUPPORTED_MEDIA_TYPE",
            "INPUT_INVALID",
            "QUOTA_EXCEEDED",
        ),
        body="CredentialRequest",
    ),
    Operation(
        "GET",
        "/api/ai/credentials",
        list_credentials,
        "Your keys, newest first, by their last four characters and a fingerprint",
        {200: "CredentialList"},
        errors=("UNAUTHORIZED", "INPUT_INVALID"),
    ),
    Operation(
        "DELETE",
        "/api/ai/credentials/{credentialId}",
        delete_credential,
        "Delete one of your keys; waiting jobs that use it fail",
        {204: None},
        errors=(
            "BAD_REQUEST",
            "UNAUTHORIZED",
            "NOT_FOUND",
            "PAYLOAD_TOO_LARGE",
            "UNSUPPORTED_MEDIA_TYPE",
            "INPUT_INVALID",
        ),
        body="NoBody",
        body_required=False,
    ),
)
