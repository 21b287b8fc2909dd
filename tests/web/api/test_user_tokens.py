"""Tokens that are accepted, and the one answer to all others."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import replace
from typing import Any

import jwt
import pytest
from flask.testing import FlaskClient

from aijobs.settings import Settings
from aijobs.web.factory import create_app
from aijobs.web.user_tokens import find_user_id
from aijobs.wiring.services import Services
from tests.web.api.conftest import SECRET, user_token

LATER = time.time() + 600


def unsigned(claims: dict[str, Any]) -> str:
    parts = ({"alg": "none", "typ": "JWT"}, claims)
    return ".".join(base64.urlsafe_b64encode(json.dumps(p).encode()).rstrip(b"=").decode() for p in parts) + "."


BAD = {
    "no token": "",
    "nonsense": "abc",
    "three dots": "...",
    "unsigned": unsigned({"sub": "u1", "exp": LATER}),
    "another secret": jwt.encode({"sub": "u1", "exp": LATER}, "x" * 32, "HS256"),
    "another algorithm": jwt.encode({"sub": "u1", "exp": LATER}, "j" * 64, "HS512"),
    "expired": user_token(exp=time.time() - 60),
    "without an end": jwt.encode({"sub": "u1"}, SECRET, "HS256"),
    "an end that is no number": user_token(exp="soon"),
    "an end beyond all": user_token(exp=float("inf")),
    "without a user": jwt.encode({"exp": LATER}, SECRET, "HS256"),
    "an empty user": user_token(""),
    "a null user": user_token(None),
    "a user's name that ends with a space": user_token("u1 "),
    "a user's name with NUL": user_token("u\0"),
    "half a pair": user_token("\ud800"),
    "too long a name": user_token("u" * 256),
    "not yet": user_token(nbf=time.time() + 600),
    "a very long one": "a" * 100_000,
}


@pytest.mark.parametrize("token", BAD.values(), ids=BAD.keys())
def test_invalid_token_is_unauthorized(client: FlaskClient, token: str) -> None:
    answer = client.get("/api/ai/jobs", headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 401
    assert answer.json == {"error": {"code": "UNAUTHORIZED", "message": "Please sign in."}}
    assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("sub", [1, 0, 1.0, True, ["u1"], {"id": "u1"}])
def test_token_whose_user_is_not_a_text_is_invalid(settings: Settings, sub: Any) -> None:
    def encode(value: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    import hashlib
    import hmac

    signed = f"{encode({'alg': 'HS256', 'typ': 'JWT'})}.{encode({'sub': sub, 'exp': LATER})}"
    signature = hmac.new(SECRET.encode(), signed.encode(), hashlib.sha256).digest()
    token = f"{signed}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"
    assert find_user_id(token, settings) is None


@pytest.mark.parametrize("header", ["", "Bearer", "Basic dTpw", "bearer", "Token x"])
def test_other_authorization_schemes_are_unauthorized(client: FlaskClient, header: str) -> None:
    assert client.get("/api/ai/jobs", headers={"Authorization": header}).status_code == 401


def test_configured_audience_is_required(services: Services, settings: Settings) -> None:
    strict = replace(settings, jwt_audience="learning-app")
    assert find_user_id(user_token(aud="learning-app"), strict) == "u1"
    assert find_user_id(user_token(aud=["x", "learning-app"]), strict) == "u1"
    assert find_user_id(user_token(aud="another"), strict) is None
    assert find_user_id(user_token(), strict) is None
    assert find_user_id(user_token(aud="whatever"), settings) == "u1"
    client = create_app(services=replace(services, settings=strict)).test_client()
    assert client.get("/api/ai/jobs", headers={"Authorization": f"Bearer {user_token()}"}).status_code == 401


def test_user_names_may_be_in_any_language(settings: Settings) -> None:
    for name in ("学生-1", "Ü ser", "u" * 255, "a:b*c", "💡"):
        assert find_user_id(user_token(name), settings) == name


def test_operator_token_is_unauthorized_in_the_user_api(client: FlaskClient, operator: Any) -> None:
    assert client.get("/api/ai/jobs", headers=operator("SUPER_ADMIN").headers).status_code == 401
