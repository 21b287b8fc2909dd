"""Fixtures: the web application over a migrated database and a real broker, and its users and operators."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jwt
import pytest
from flask import Flask
from flask.testing import FlaskClient

from aijobs.db.database import Database
from aijobs.operators.models import Operator, OperatorToken
from aijobs.settings import KeyRing, Settings
from aijobs.web.auth import hash_password, make_operator_token
from aijobs.web.factory import create_app
from aijobs.wiring.services import Services, build_services
from tests.support.databases import SqliteDatabases
from tests.support.processes import Run
from tests.support.rows import BEGIN, add
from tests.support.scratch import open_database, scratch_database

SECRET = "j" * 32
PASSWORD = "correct horse"
PASSWORD_HASH = hash_password(PASSWORD)


@pytest.fixture
def settings(sqlite: SqliteDatabases, redis_url: str, run: Run) -> Settings:
    return Settings(
        instance_path=run.new_folder("web"),
        database_url=scratch_database(sqlite),
        redis_url=redis_url,
        secret_key="s" * 32,
        jwt_secret=SECRET,
        message_keys=KeyRing((("k1", b"m" * 32),)),
        credential_keys=KeyRing((("c1", b"c" * 32),)),
    )


@pytest.fixture
def services(settings: Settings) -> Iterator[Services]:
    with open_database(settings.database_url) as database:
        services = build_services(settings, database=database)
        yield services
        services.broker.client.close()


@pytest.fixture
def database(services: Services) -> Database:
    return services.database


@pytest.fixture
def app(services: Services) -> Flask:
    return create_app(services=services)


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    return app.test_client()


def user_token(sub: Any = "u1", **claims: Any) -> str:
    """Return a token of the learning app for the user `sub`."""
    return jwt.encode({"sub": sub, "exp": time.time() + 600, **claims}, SECRET, "HS256")


def as_user(sub: str = "u1") -> dict[str, str]:
    """Return the headers of a request by the user `sub`."""
    return {"Authorization": f"Bearer {user_token(sub)}"}


@dataclass(frozen=True)
class Person:
    """An operator and the headers of a request with their token."""

    username: str
    headers: dict[str, str]


@pytest.fixture
def operator(database: Database) -> Callable[[str], Person]:
    """`operator(role)` creates an operator with that role and a token."""

    def make(role: str) -> Person:
        username = f"{role.lower()}-{time.monotonic_ns()}"
        row = Operator(username=username, password_hash=PASSWORD_HASH, role=role, created_at=BEGIN)
        token, digest = make_operator_token()
        add(database, row)
        add(database, OperatorToken(operator_id=row.id, token_hash=digest, label="test", created_at=BEGIN))
        return Person(username, {"Authorization": f"Bearer {token}"})

    return make
