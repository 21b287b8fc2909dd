"""The AI providers and the routes to them: the built-in ones, and those of a providers file.

Base URLs come from the operator's file alone. No request and no user can name one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from aijobs.ai.provider import Route
from aijobs.definitions.definition import USER_MODES
from aijobs.errors import SettingsError

BUILT_IN = Path(__file__).with_name("providers.toml")
LOCAL = Route("local", "local-extractive-v1")
"""The built-in provider, which needs no network and no key."""
DEFAULT = "default"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")

JsonMode = Literal["json_schema", "json_object", "prompt"]
"""How a server is asked for JSON: by a schema, by "one JSON object", or by the prompt alone."""


def _is_near(host: str) -> bool:
    """Return whether a host is on this machine or in its own network, by its name."""
    try:
        address = ip_address(host)
    except ValueError:
        return "." not in host or host.endswith((".local", ".internal", ".lan", ".localhost"))
    return address.is_private or address.is_loopback


def _base_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("https", "http") or not parts.hostname:
        raise ValueError("is an https:// or http:// address")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("is an address with no user, query or fragment")
    if parts.scheme == "http" and not _is_near(parts.hostname):
        raise ValueError("is https:// for a server beyond your own network: keys and notes would go in clear")
    return text.rstrip("/")


class _Provider(BaseModel):
    """A `[provider.NAME]` table."""

    model_config = ConfigDict(extra="forbid", strict=True)

    base_url: Annotated[str, AfterValidator(_base_url)]
    models: list[Annotated[str, Field(min_length=1, max_length=128)]] = Field(min_length=1)
    json_mode: JsonMode = "json_schema"
    key: Literal["required", "none"] = "required"
    prices_as: str | None = None
    tokens_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    max_output_tokens: int | None = Field(None, ge=1, le=1_000_000)
    context_tokens: int | None = Field(None, ge=1, le=100_000_000)
    max_concurrent_calls: int = Field(0, ge=0, le=1000)
    moderation_model: str | None = None
    connect_s: float = Field(5, gt=0, le=60, strict=False)
    first_data_s: float = Field(120, gt=0, le=600, strict=False)
    idle_s: float = Field(30, gt=0, le=600, strict=False)
    extra_body: dict[str, Any] = Field(default_factory=dict)


class _File(BaseModel):
    """A providers file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    provider: dict[str, _Provider] = Field(default_factory=dict)
    routes: dict[str, list[str]] = Field(default_factory=dict)
    user_routes: dict[str, list[str]] = Field(default_factory=dict)


@dataclass(frozen=True)
class ProviderConfig:
    """How to reach one OpenAI-compatible server. Durations are in seconds."""

    name: str
    base_url: str
    models: tuple[str, ...]
    json_mode: JsonMode
    key: str | None = field(repr=False)
    """The platform's key; None if there is none."""
    needs_key: bool
    prices_as: str
    """The provider's name in the price list."""
    tokens_name: str
    """The field that limits an answer's tokens for its models."""
    max_output_tokens: int | None
    context_tokens: int | None
    """Maximum tokens of prompt and answer together; None if unknown."""
    max_concurrent_calls: int
    """Maximum concurrent calls across all workers; 0: no limit."""
    moderation_model: str | None
    connect_s: float
    first_data_s: float
    idle_s: float
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    """The entries of the operator's file."""

    def written_limits(self) -> Iterator[tuple[str, float]]:
        """Yield each limit in seconds that the operator's file sets: its entry and its value."""
        for entry in ("connect_s", "first_data_s", "idle_s"):
            if entry in self.written:
                yield entry, getattr(self, entry)

    @property
    def ready(self) -> bool:
        """Whether the platform can call it."""
        return self.key is not None or not self.needs_key

    @property
    def host(self) -> str:
        """The host of the base URL, for people."""
        return urlsplit(self.base_url).netloc


@dataclass(frozen=True)
class Catalogue:
    """All providers and all routes by name. A route is a list of places, in order."""

    providers: Mapping[str, ProviderConfig]
    routes: Mapping[str, tuple[Route, ...]]
    user_routes: Mapping[str, tuple[Route, ...]]

    @classmethod
    def load(cls, path: str | Path | None, keys: Mapping[str, str]) -> Catalogue:
        """Return the built-in catalogue with the file at `path`, if given, and the platform's `keys` by provider.

        The default route is DeepSeek if it has a key, otherwise the built-in provider. `SettingsError` names the file
        and the fault: a route to an unknown provider, a platform route without a key, a key for an unknown provider.
        """
        built_in, own = _read(BUILT_IN), _read(Path(path)) if path else _File()
        tables = {**built_in.provider, **own.provider}
        where = Path(path).name if path else "the built-in providers"
        _check_names(where, tables, keys)
        written = {name: frozenset(table.model_fields_set) for name, table in own.provider.items()}
        providers = {
            name: _config(name, table, keys.get(name), written.get(name, frozenset())) for name, table in tables.items()
        }
        named = {name: _routes(where, name, texts, providers) for name, texts in own.routes.items()}
        users = {
            mode: _routes(where, mode, texts, providers)
            for mode, texts in {**built_in.user_routes, **own.user_routes}.items()
        }
        _check_keys(where, named, providers)
        _check_moderators(where, providers)
        if unknown := set(users) - set(USER_MODES):
            raise SettingsError(f"{where}: user_routes has {min(unknown)}; it is for {', '.join(sorted(USER_MODES))}")
        if LOCAL.provider in {route.provider for routes in users.values() for route in routes}:
            raise SettingsError(f"{where}: the built-in provider takes no user's key")
        named.setdefault(DEFAULT, (_deepseek(providers),) if providers["deepseek"].ready else (LOCAL,))
        return cls(providers, named, users)

    def price_names(self) -> Mapping[str, str]:
        """Return each provider's name in the price list."""
        return {name: provider.prices_as for name, provider in self.providers.items()}


def _deepseek(providers: Mapping[str, ProviderConfig]) -> Route:
    return Route("deepseek", providers["deepseek"].models[0])


def _read(path: Path) -> _File:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"AIJOBS_PROVIDERS: there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"the providers file {path.name} can't be read: {error}") from None
    try:
        return _File.model_validate(document)
    except ValidationError as error:
        # Without the input, which may hold a key in the wrong place.
        first = error.errors(include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise SettingsError(f"the providers file {path.name}: {place}: {first['msg']}") from None


def _config(name: str, table: _Provider, key: str | None, written: frozenset[str]) -> ProviderConfig:
    return ProviderConfig(
        name=name,
        base_url=table.base_url,
        models=tuple(table.models),
        json_mode=table.json_mode,
        key=key,
        needs_key=table.key == "required",
        prices_as=table.prices_as or name,
        tokens_name=table.tokens_name,
        max_output_tokens=table.max_output_tokens,
        context_tokens=table.context_tokens,
        max_concurrent_calls=table.max_concurrent_calls,
        moderation_model=table.moderation_model,
        connect_s=table.connect_s,
        first_data_s=table.first_data_s,
        idle_s=table.idle_s,
        extra_body=table.extra_body,
        written=written,
    )


def _check_names(where: str, tables: Mapping[str, _Provider], keys: Mapping[str, str]) -> None:
    for name in tables:
        if not _NAME.fullmatch(name) or name == LOCAL.provider:
            raise SettingsError(f"{where}: a provider can't be called {name!r}: {_NAME.pattern}, and not local")
    for name in keys:
        if name not in tables:
            known = ", ".join(sorted(tables))
            raise SettingsError(f"AIJOBS_{name.upper()}_API_KEY: there is no provider {name}; there are {known}")


def _routes(where: str, name: str, texts: list[str], providers: Mapping[str, ProviderConfig]) -> tuple[Route, ...]:
    if not texts:
        raise SettingsError(f"{where}: route {name} leads nowhere")
    return tuple(_route(where, name, text, providers) for text in texts)


def _route(where: str, name: str, text: str, providers: Mapping[str, ProviderConfig]) -> Route:
    provider, _, model = text.partition("/")
    route = Route(provider, model)
    if route == LOCAL or (provider in providers and model in providers[provider].models):
        return route
    raise SettingsError(f"{where}: route {name}: {text!r} is no provider/model of this file")


def _check_moderators(where: str, providers: Mapping[str, ProviderConfig]) -> None:
    """Refuse a moderation model that can't be called. An operator who names one relies on it."""
    for name, config in providers.items():
        if config.moderation_model and not config.ready:
            raise SettingsError(f"{where}: the moderation of {name} needs a key: set AIJOBS_{name.upper()}_API_KEY")


def _check_keys(where: str, routes: Mapping[str, tuple[Route, ...]], providers: Mapping[str, ProviderConfig]) -> None:
    for name, choices in routes.items():
        for route in choices:
            if route != LOCAL and not providers[route.provider].ready:
                variable = f"AIJOBS_{route.provider.upper()}_API_KEY"
                raise SettingsError(f"{where}: route {name} needs a key for {route.provider}: set {variable}")
