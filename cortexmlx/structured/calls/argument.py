"""Argument: what a tool's schema says of one argument, for formats in which texts stand as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from json.encoder import encode_basestring
from typing import Any

from cortexmlx.structured.calls.reader import NotACall, json_value
from cortexmlx.structured.schemas import target_of
from cortexmlx.structured.tools import Tool

Schema = Mapping[str, Any]

MOST_REFERENCES = 32
"""How many references of references are followed, and how deep the ways of ways are looked at."""

_ENCODER = json.JSONEncoder(ensure_ascii=False)

_WAYS = ("anyOf", "oneOf")

_OF_TEXTS = ("pattern", "format", "minLength", "maxLength", "enum", "const", "not")
"""Keywords that say which texts a value may be."""

_OF_WHOLE = (
    *("allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies"),
    *("minProperties", "maxProperties", "propertyNames"),
)
"""Keywords of a tool's schema that say which arguments go together."""

_KINDS: Mapping[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}

_VALUES: Mapping[str, list[Any]] = {"null": [None], "boolean": [True, False]}
"""The types that have few values."""

_UNTYPED = frozenset({"string", "array", "object"})
"""What a value may be if its schema does not say: a text, unless it is JSON of several parts."""


@dataclass(frozen=True)
class Argument:
    """One argument of a tool."""

    schema: Schema
    """Its schema, which is no reference."""
    whole: Schema
    """The schema of all arguments, in which references are looked up."""

    @cached_property
    def named_types(self) -> frozenset[str]:
        """The types that a value may have; none if the schema does not say."""
        return _Parts(self.schema, self.whole).types()

    @property
    def types(self) -> frozenset[str]:
        """The types that a value may have."""
        return self.named_types or _UNTYPED

    @cached_property
    def texts(self) -> list[str]:
        """The values, as they are written, if the schema lists them."""
        values = _Parts(self.schema, self.whole).values() or []
        return list(dict.fromkeys(each if isinstance(each, str) else dumped(each) for each in values))

    @property
    def is_free(self) -> bool:
        """Whether a value may be any text, which stands as it is."""
        return "string" in self.types and not self.texts

    def json_of(self, text: str) -> str:
        """Return a value that stands as it is, without quotes, as JSON. A text is the text that was written, unless the
        schema takes no such text. What is no value of the schema is a text: it does not fit, and a note will say so.
        """
        if not self.is_free and text not in self._listed_texts:
            try:
                json_value(text)
            except NotACall:
                pass
            else:
                if text.strip() in self.texts or "string" not in self.types:
                    return text.strip()
        return dumped(text)

    def json_of_literal(self, written: str, literal: str | None) -> str:
        """Return a value of a format in which texts stand in quotes, and other values without, as JSON. `literal` is
        that JSON, None if it is not of this kind. Without quotes, a text is the text that was written.
        """
        if literal is None:
            return dumped(written)
        value = json_value(literal)
        kinds = self.named_types
        if "string" in kinds and not any(fits(value, kind) for kind in kinds):
            return dumped(written)
        return literal

    @cached_property
    def _listed_texts(self) -> frozenset[str]:
        values = _Parts(self.schema, self.whole).values() or []
        return frozenset(value for value in values if isinstance(value, str))

    @property
    def ignored(self) -> list[str]:
        """The keywords that a value which `is_free` may not fit."""
        found = set(_Parts(self.schema, self.whole).keywords()) if self.is_free else set[str]()
        return [keyword for keyword in _OF_TEXTS if keyword in found]


class Arguments(dict[str, Argument]):
    """A tool's arguments by their names. One that the schema does not name is what it says of others, or any text."""

    def __init__(self, tool: Tool) -> None:
        whole = tool.schema
        own = resolved(whole, whole) or whole
        properties = own.get("properties")
        named: dict[str, object] = dict(properties) if isinstance(properties, Mapping) else {}
        for key in required_of(tool):
            named.setdefault(key, {})
        known = {key: schema for key, schema in named.items() if schema is not False}
        super().__init__({key: Argument(resolved(schema, whole) or {}, whole) for key, schema in known.items()})
        self._other = Argument(resolved(own.get("additionalProperties"), whole) or {}, whole)

    def __missing__(self, key: str) -> Argument:
        return self._other


def required_of(tool: Tool) -> list[str]:
    """Return the names of the arguments that a call must have."""
    whole = tool.schema
    required = (resolved(whole, whole) or whole).get("required")
    return [key for key in required if isinstance(key, str)] if isinstance(required, list) else []


def ignored_of_whole(tool: Tool) -> list[str]:
    """Return the keywords of a tool's schema about which arguments go together."""
    whole = tool.schema
    own = resolved(whole, whole) or whole
    return [keyword for keyword in _OF_WHOLE if keyword in own]


def unresolved(tool: Tool) -> str | None:
    """Return a reference, of a tool's schema or of an argument, that leads nowhere; None if there is none."""
    whole = tool.schema
    own = resolved(whole, whole)
    properties = {} if own is None else own.get("properties")
    schemas = [whole, *(properties.values() if isinstance(properties, Mapping) else ())]
    return next((str(each["$ref"]) for each in schemas if resolved(each, whole) is None), None)


def resolved(schema: object, whole: Schema) -> Schema | None:
    """Return a schema without a reference at its top; None if the reference leads nowhere."""
    for _ in range(MOST_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        if "$ref" not in schema:
            return schema
        found = target_of(schema["$ref"], whole)
        if found is None:
            return None
        rest = {name: value for name, value in schema.items() if name != "$ref"}
        schema = {**found, **rest} if isinstance(found, Mapping) else rest
    return None


def dumped(value: object) -> str:
    """Return a value as JSON text."""
    return _ENCODER.encode(value)


def escaped(text: str) -> str:
    """Return a text as it stands between the quotes of a JSON text."""
    return encode_basestring(text)[1:-1]


def fits(value: object, kind: str) -> bool:
    """Return whether a value has a type of JSON schema."""
    return isinstance(value, _KINDS.get(kind, ())) and (kind == "boolean" or not isinstance(value, bool))


class _Parts:
    """A schema with those that it is made of. Each reference is followed once."""

    def __init__(self, schema: Schema, whole: Schema, seen: set[str] | None = None, depth: int = 0) -> None:
        self.schema = schema
        self._whole = whole
        self._seen = set[str]() if seen is None else seen
        self._depth = depth

    def of(self, *names: str) -> Iterator[_Parts]:
        """Yield the schemas that are listed under some names."""
        for name in names if self._depth < MOST_REFERENCES else ():
            listed = self.schema.get(name)
            for each in listed if isinstance(listed, list) else ():
                if isinstance(each, Mapping) and "$ref" in each:
                    if str(each["$ref"]) in self._seen:
                        continue
                    self._seen.add(str(each["$ref"]))
                yield _Parts(resolved(each, self._whole) or {}, self._whole, self._seen, self._depth + 1)

    def types(self) -> frozenset[str]:
        """Return the types that values may have; none if the schema does not say."""
        own = self.schema.get("type")
        if said := [own] if isinstance(own, str) else own if isinstance(own, list) else []:
            return frozenset(kind for kind in said if isinstance(kind, str))
        if (values := self._own_values) is not None:
            return frozenset(kind for value in values for kind in _KINDS if fits(value, kind))
        for part in self.of("allOf"):
            if types := part.types():
                return types
        ways = [part.types() for part in self.of(*_WAYS)]
        return frozenset[str]().union(*ways) if all(ways) else frozenset()

    def values(self) -> list[Any] | None:
        """Return all values; None if the schema does not list them."""
        if (values := self._own_values) is not None:
            return values
        kind = self.schema.get("type")
        if isinstance(kind, str) and kind in _VALUES:
            return _VALUES[kind]
        listed: list[Any] = []
        for part in self.of(*_WAYS):
            more = part.values()
            if more is None:
                return None
            listed += more
        return listed or None

    def keywords(self) -> Iterator[str]:
        """Yield the keywords of all of them."""
        yield from self.schema
        for part in self.of(*_WAYS, "allOf"):
            yield from part.keywords()

    @property
    def _own_values(self) -> list[Any] | None:
        values = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum")
        return values if isinstance(values, list) else None
