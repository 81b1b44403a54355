"""Argument: what a tool's JSON schema says about one argument, for formats that write strings without quotes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from json.encoder import encode_basestring
from typing import Any

from cortexmlx.structured.calls.reader import NotACall, parse_strict_json
from cortexmlx.structured.schemas import resolve_pointer
from cortexmlx.structured.tools import Tool

Schema = Mapping[str, Any]

MOST_REFERENCES = 32
"""How many references of references are followed, and how deep the ways of ways are looked at."""

_ENCODER = json.JSONEncoder(ensure_ascii=False)

_WAYS = ("anyOf", "oneOf")

_STRING_KEYWORDS = ("pattern", "format", "minLength", "maxLength", "enum", "const", "not")
"""Keywords that say which texts a value may be."""

_RELATION_KEYWORDS = (
    *("allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies"),
    *("minProperties", "maxProperties", "propertyNames"),
)
"""Keywords of a tool's schema that say which arguments go together."""

_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
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
    """The schema of one argument of a tool."""

    schema: Schema
    """Its schema, which is no reference."""
    whole: Schema
    """The schema of all arguments, in which references are looked up."""

    @cached_property
    def declared_types(self) -> frozenset[str]:
        """The JSON types that the schema declares; empty if it declares none."""
        return _SchemaParts(self.schema, self.whole).value_types()

    @property
    def types(self) -> frozenset[str]:
        """The JSON types that a value may have: those declared, or else string, array and object."""
        return self.declared_types or _UNTYPED

    @cached_property
    def listed_values(self) -> list[str]:
        """The only values that the schema allows (by `enum`, `const`, or the types null and boolean), as they are
        written; empty if it lists none.
        """
        values = _SchemaParts(self.schema, self.whole).listed_values() or []
        return list(dict.fromkeys(each if isinstance(each, str) else to_json_text(each) for each in values))

    @property
    def is_free_text(self) -> bool:
        """Whether a value may be any text, which is written without quotes."""
        return "string" in self.types and not self.listed_values

    def to_json(self, text: str) -> str:
        """Convert a value that was written without quotes to JSON. It is a string, unless the schema allows no such
        string. What does not fit the schema becomes a string: a note will say that it does not fit.
        """
        if not self.is_free_text and text not in self._listed_strings:
            try:
                parse_strict_json(text)
            except NotACall:
                pass
            else:
                if text.strip() in self.listed_values or "string" not in self.types:
                    return text.strip()
        return to_json_text(text)

    def literal_to_json(self, written: str, literal: str | None) -> str:
        """Convert a literal to JSON, of a format that quotes strings. `literal` is the value as JSON, or None if it is
        no JSON. Then it becomes the string that was written, as does a value of none of the declared types if a
        string is one of them.
        """
        if literal is None:
            return to_json_text(written)
        value = parse_strict_json(literal)
        kinds = self.declared_types
        if "string" in kinds and not any(has_json_type(value, kind) for kind in kinds):
            return to_json_text(written)
        return literal

    @cached_property
    def _listed_strings(self) -> frozenset[str]:
        """The strings among the values that the schema lists."""
        values = _SchemaParts(self.schema, self.whole).listed_values() or []
        return frozenset(value for value in values if isinstance(value, str))

    @property
    def unenforced_keywords(self) -> list[str]:
        """The schema's keywords about strings that are not enforced where any text is allowed."""
        found = set(_SchemaParts(self.schema, self.whole).keywords()) if self.is_free_text else set[str]()
        return [keyword for keyword in _STRING_KEYWORDS if keyword in found]


class Arguments(dict[str, Argument]):
    """The arguments of a tool by name. A name that the schema lacks has the schema of `additionalProperties`; without
    one, it may be any text.
    """

    def __init__(self, tool: Tool) -> None:
        whole = tool.schema
        own = resolve_reference(whole, whole) or whole
        properties = own.get("properties")
        named: dict[str, object] = dict(properties) if isinstance(properties, Mapping) else {}
        for key in required_arguments(tool):
            named.setdefault(key, {})
        known = {key: schema for key, schema in named.items() if schema is not False}
        super().__init__(
            {key: Argument(resolve_reference(schema, whole) or {}, whole) for key, schema in known.items()}
        )
        self._other = Argument(resolve_reference(own.get("additionalProperties"), whole) or {}, whole)

    def __missing__(self, key: str) -> Argument:
        return self._other


def required_arguments(tool: Tool) -> list[str]:
    """Return the names of the arguments that a call must have."""
    whole = tool.schema
    required = (resolve_reference(whole, whole) or whole).get("required")
    return [key for key in required if isinstance(key, str)] if isinstance(required, list) else []


def unenforced_tool_keywords(tool: Tool) -> list[str]:
    """Return the keywords of a tool's schema that relate arguments to each other, and are not enforced."""
    whole = tool.schema
    own = resolve_reference(whole, whole) or whole
    return [keyword for keyword in _RELATION_KEYWORDS if keyword in own]


def find_broken_reference(tool: Tool) -> str | None:
    """Return a `$ref` of a tool's schema, or of an argument, that leads nowhere; None if there is none."""
    whole = tool.schema
    own = resolve_reference(whole, whole)
    properties = {} if own is None else own.get("properties")
    schemas = [whole, *(properties.values() if isinstance(properties, Mapping) else ())]
    return next((str(each["$ref"]) for each in schemas if resolve_reference(each, whole) is None), None)


def resolve_reference(schema: object, whole: Schema) -> Schema | None:
    """Follow the `$ref` at the top of a schema. Return the schema without it; None if it leads nowhere."""
    for _ in range(MOST_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        if "$ref" not in schema:
            return schema
        found = resolve_pointer(schema["$ref"], whole)
        if found is None:
            return None
        rest = {name: value for name, value in schema.items() if name != "$ref"}
        schema = {**found, **rest} if isinstance(found, Mapping) else rest
    return None


def to_json_text(value: object) -> str:
    """Return a value as JSON text, with non-ASCII characters as they are."""
    return _ENCODER.encode(value)


def escape_json(text: str) -> str:
    """Return a text as it is written between the quotes of a JSON string."""
    return encode_basestring(text)[1:-1]


def has_json_type(value: object, kind: str) -> bool:
    """Return whether a value has a type of JSON Schema."""
    return isinstance(value, _PYTHON_TYPES.get(kind, ())) and (kind == "boolean" or not isinstance(value, bool))


class _SchemaParts:
    """A schema with the schemas that it combines by `allOf`, `anyOf` and `oneOf`. Each reference is followed once."""

    def __init__(self, schema: Schema, whole: Schema, seen: set[str] | None = None, depth: int = 0) -> None:
        self.schema = schema
        self._whole = whole
        self._seen = set[str]() if seen is None else seen
        self._depth = depth

    def listed_under(self, *names: str) -> Iterator[_SchemaParts]:
        """Yield the schemas that are listed under some keywords."""
        for name in names if self._depth < MOST_REFERENCES else ():
            listed = self.schema.get(name)
            for each in listed if isinstance(listed, list) else ():
                if isinstance(each, Mapping) and "$ref" in each:
                    if str(each["$ref"]) in self._seen:
                        continue
                    self._seen.add(str(each["$ref"]))
                yield _SchemaParts(resolve_reference(each, self._whole) or {}, self._whole, self._seen, self._depth + 1)

    def value_types(self) -> frozenset[str]:
        """Return the JSON types that values may have; empty if the schema does not say."""
        own = self.schema.get("type")
        if said := [own] if isinstance(own, str) else own if isinstance(own, list) else []:
            return frozenset(kind for kind in said if isinstance(kind, str))
        if (values := self._own_values) is not None:
            return frozenset(kind for value in values for kind in _PYTHON_TYPES if has_json_type(value, kind))
        for part in self.listed_under("allOf"):
            if types := part.value_types():
                return types
        ways = [part.value_types() for part in self.listed_under(*_WAYS)]
        return frozenset[str]().union(*ways) if all(ways) else frozenset()

    def listed_values(self) -> list[Any] | None:
        """Return all values that are allowed; None if the schema does not list them."""
        if (values := self._own_values) is not None:
            return values
        kind = self.schema.get("type")
        if isinstance(kind, str) and kind in _VALUES:
            return _VALUES[kind]
        listed: list[Any] = []
        for part in self.listed_under(*_WAYS):
            more = part.listed_values()
            if more is None:
                return None
            listed += more
        return listed or None

    def keywords(self) -> Iterator[str]:
        """Yield the keywords of the schema and of those that it combines."""
        yield from self.schema
        for part in self.listed_under(*_WAYS, "allOf"):
            yield from part.keywords()

    @property
    def _own_values(self) -> list[Any] | None:
        """The values of the schema's own `const` or `enum`; None if it has neither."""
        values = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum")
        return values if isinstance(values, list) else None
