"""The base of JSON answers.

A dataclass derived from `Answer` is a row of a list, its JSON answer and its OpenAPI schema, so its fields are declared
once. JSON names are camelCase; `Field(serialization_alias=…)` gives a field another name, `Field(exclude=True)` keeps
it out of the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AliasGenerator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    TypeAdapter,
    WithJsonSchema,
    model_serializer,
)
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import CoreSchema

from aijobs.canonical import json_name
from aijobs.clock import iso

T = TypeVar("T")
Schema = dict[str, Any]
_REF = "#/components/schemas/"


def is_none(value: object) -> bool:
    """Return whether a field has no value; for `exclude_if`."""
    return value is None


class _NeverNull:
    """Declares in the schema that an optional field is left out instead of being null."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        schema = handler(core)
        return next((one for one in schema.get("anyOf", ()) if one != {"type": "null"}), schema)


Maybe = Annotated[T | None, _NeverNull(), Field(exclude_if=is_none)]
"""A field that is left out while it has no value."""
FOR_SOME = Field(exclude_if=lambda _: False)
"""Marks a field that readers without the right don't get. The schema doesn't require it."""
TIME: Schema = {"type": "string", "format": "date-time", "pattern": "Z$"}
Time = Annotated[datetime, PlainSerializer(iso), WithJsonSchema(TIME)]
"""A time: ISO 8601 in UTC with a `Z`."""
Natural = Annotated[int, Field(ge=0)]
_MILLISECONDS = WithJsonSchema({"type": "integer", "minimum": 0})
Milliseconds = Annotated[float, PlainSerializer(lambda seconds: round(seconds * 1000)), _MILLISECONDS]
"""Seconds in Python, whole milliseconds in JSON."""
Span = Annotated[timedelta, PlainSerializer(lambda span: round(span.total_seconds() * 1000)), _MILLISECONDS]
"""A time span, as whole milliseconds in JSON."""


def one_of(words: Iterable[str]) -> WithJsonSchema:
    """Return the schema of a text that is one of these words."""
    return WithJsonSchema({"type": "string", "enum": list(words)})


class Answer:
    """The base of dataclasses that are JSON answers."""

    schema_name: ClassVar[str | None] = None
    """The name in OpenAPI documents; None: the class's own."""
    __pydantic_config__ = ConfigDict(
        alias_generator=AliasGenerator(serialization_alias=json_name),
        extra="forbid",
        json_schema_serialization_defaults_required=True,
    )


class Flattened(Answer):
    """An answer whose JSON also holds the fields of one of its fields, which is an answer itself."""

    flattened: ClassVar[str]
    """The name of that field, of one word."""

    @model_serializer(mode="wrap")
    def _flatten(self, handler):  # type: ignore[no-untyped-def]  # A return type would replace the schema.
        body = handler(self)
        return body.pop(self.flattened) | body

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        schema = handler(core)
        own = handler.resolve_ref_schema(schema)
        inner = handler.resolve_ref_schema(own["properties"].pop(cls.flattened))
        own["properties"] = inner["properties"] | own["properties"]
        own["required"] = [*inner.get("required", ()), *(n for n in own.get("required", ()) if n != cls.flattened)]
        return schema


_ADAPTERS: dict[type[Answer], TypeAdapter[Any]] = {}


def _adapter(kind: type[Answer]) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def to_json(answer: Answer) -> dict[str, Any]:
    """Return the JSON object of an answer."""
    body: dict[str, Any] = _adapter(type(answer)).dump_python(answer, mode="json", by_alias=True)
    return body


class _Schemas(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def to_schemas(kinds: Sequence[type[Answer]]) -> dict[str, Schema]:
    """Return the JSON Schemas of these answers and of all that they contain, by their OpenAPI names."""
    inputs: list[Any] = [(kind, "serialization", _adapter(kind)) for kind in kinds]
    _, found = TypeAdapter.json_schemas(
        inputs, by_alias=True, ref_template=f"{_REF}{{model}}", schema_generator=_Schemas
    )
    names = {kind.__name__: kind.schema_name or kind.__name__ for kind in _derived(Answer)}
    renamed = re.sub(rf"(?<={_REF})\w+", lambda ref: names.get(ref[0], ref[0]), json.dumps(found["$defs"]))
    return {names.get(name, name): schema for name, schema in json.loads(renamed).items()}


def _derived(kind: type[Answer]) -> Iterator[type[Answer]]:
    for derived in kind.__subclasses__():
        yield derived
        yield from _derived(derived)
