"""Argument: what a tool's JSON schema says about one argument, for formats that write strings without quotes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from json.encoder import encode_basestring
from typing import Any

from cortexmlx.structured.calls.reader import parse_strict_json
from cortexmlx.structured.schemas import resolve_pointer
from cortexmlx.structured.tools import Tool

Schema = Mapping[str, Any]

MAX_REFERENCES = 32
"""How many references of references are followed, and how deep alternatives within alternatives are looked at."""

_ENCODER = json.JSONEncoder(ensure_ascii=False)

_ALTERNATIVES = ("anyOf", "oneOf")

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
    root_schema: Schema
    """The schema of all arguments, in which references are looked up."""

    @cached_property
    def declared_types(self) -> frozenset[str]:
        """The JSON types that the schema declares; empty if it declares none."""
        return _SchemaParts(self.schema, self.root_schema).value_types()

    @property
    def types(self) -> frozenset[str]:
        """The JSON types that a value may have: those declared, or else string, array and object."""
        return self.declared_types or _UNTYPED

    @cached_property
    def listed_values(self) -> list[str]:
        """The only values that the schema allows (`enum`, `const`, null, boolean), as written; empty if not listed."""
        values = _SchemaParts(self.schema, self.root_schema).listed_values() or []
        return list(dict.fromkeys(each if isinstance(each, str) else to_json_text(each) for each in values))

    @property
    def is_free_text(self) -> bool:
        """Whether a value may be any text, which is written without quotes."""
        return "string" in self.types and not self.listed_values

    def to_json(self, text: str, literal: str | None) -> str:
        """Convert to JSON a value that was written without quotes. `literal` is the same value read as JSON, or None if
        it is no JSON. Return a JSON string, or `literal` if the schema does not allow the text as a string.
        """
        if literal is None or self.is_free_text or text in self.listed_strings:
            return to_json_text(text)
        is_listed = literal in self.listed_values and literal not in self.listed_strings
        return literal if is_listed or "string" not in self.types else to_json_text(text)

    def literal_to_json(self, raw_text: str, literal: str | None) -> str:
        """Convert to JSON a value of a format that quotes strings. `literal` is the same value as JSON; None if it is
        no JSON. Return `literal`, or `raw_text` as a JSON string: if `literal` is None, or if strings are among the
        declared types and the value has none of these types.
        """
        if literal is None:
            return to_json_text(raw_text)
        value = parse_strict_json(literal)
        kinds = self.declared_types
        if "string" in kinds and not any(has_json_type(value, kind) for kind in kinds):
            return to_json_text(raw_text)
        return literal

    @cached_property
    def listed_strings(self) -> frozenset[str]:
        """The strings among the values that the schema lists."""
        values = _SchemaParts(self.schema, self.root_schema).listed_values() or []
        return frozenset(value for value in values if isinstance(value, str))

    @property
    def unenforced_keywords(self) -> list[str]:
        """The schema's keywords about strings that are not enforced where any text is allowed."""
        used_keywords = set(_SchemaParts(self.schema, self.root_schema).keywords()) if self.is_free_text else set[str]()
        return [keyword for keyword in _STRING_KEYWORDS if keyword in used_keywords]


class Arguments(dict[str, Argument]):
    """A tool's arguments by name. Other names have the schema of `additionalProperties`; without it, any text."""

    def __init__(self, tool: Tool) -> None:
        root_schema = tool.schema
        resolved_schema = resolve_reference(root_schema, root_schema) or root_schema
        properties = resolved_schema.get("properties")
        schemas_by_name: dict[str, object] = dict(properties) if isinstance(properties, Mapping) else {}
        for key in required_arguments(tool):
            schemas_by_name.setdefault(key, {})
        allowed_schemas = {key: schema for key, schema in schemas_by_name.items() if schema is not False}
        super().__init__(
            {
                key: Argument(resolve_reference(schema, root_schema) or {}, root_schema)
                for key, schema in allowed_schemas.items()
            }
        )
        self._default_argument = Argument(
            resolve_reference(resolved_schema.get("additionalProperties"), root_schema) or {}, root_schema
        )

    def __missing__(self, key: str) -> Argument:
        return self._default_argument


def required_arguments(tool: Tool) -> list[str]:
    """Return the names of the arguments that a call must have."""
    root_schema = tool.schema
    required = (resolve_reference(root_schema, root_schema) or root_schema).get("required")
    return [key for key in required if isinstance(key, str)] if isinstance(required, list) else []


def unenforced_tool_keywords(tool: Tool) -> list[str]:
    """Return the keywords of a tool's schema that relate arguments to each other, and are not enforced."""
    root_schema = tool.schema
    resolved_schema = resolve_reference(root_schema, root_schema) or root_schema
    return [keyword for keyword in _RELATION_KEYWORDS if keyword in resolved_schema]


def find_broken_reference(tool: Tool) -> str | None:
    """Return a `$ref` of a tool's schema, or of an argument, that leads nowhere; None if there is none."""
    root_schema = tool.schema
    resolved_schema = resolve_reference(root_schema, root_schema)
    properties = {} if resolved_schema is None else resolved_schema.get("properties")
    schemas = [root_schema, *(properties.values() if isinstance(properties, Mapping) else ())]
    return next((str(each["$ref"]) for each in schemas if resolve_reference(each, root_schema) is None), None)


def resolve_reference(schema: object, root_schema: Schema) -> Schema | None:
    """Follow the `$ref` at the top of a schema. Return the schema without it; None if it leads nowhere."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        if "$ref" not in schema:
            return schema
        target = resolve_pointer(schema["$ref"], root_schema)
        if target is None:
            return None
        rest = {name: value for name, value in schema.items() if name != "$ref"}
        schema = {**target, **rest} if isinstance(target, Mapping) else rest
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

    def __init__(
        self, schema: Schema, root_schema: Schema, seen_references: set[str] | None = None, depth: int = 0
    ) -> None:
        self.schema = schema
        self._root_schema = root_schema
        self._seen_references = set[str]() if seen_references is None else seen_references
        self._depth = depth

    def listed_under(self, *names: str) -> Iterator[_SchemaParts]:
        """Yield the schemas that are listed under the keywords `names`, such as `anyOf`."""
        for name in names if self._depth < MAX_REFERENCES else ():
            entries = self.schema.get(name)
            for each in entries if isinstance(entries, list) else ():
                if isinstance(each, Mapping) and "$ref" in each:
                    if str(each["$ref"]) in self._seen_references:
                        continue
                    self._seen_references.add(str(each["$ref"]))
                yield _SchemaParts(
                    resolve_reference(each, self._root_schema) or {},
                    self._root_schema,
                    self._seen_references,
                    self._depth + 1,
                )

    def value_types(self) -> frozenset[str]:
        """Return the JSON types that values may have; empty if the schema does not say."""
        declared = self.schema.get("type")
        if type_names := [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []:
            return frozenset(kind for kind in type_names if isinstance(kind, str))
        if (values := self._own_values) is not None:
            return frozenset(kind for value in values for kind in _PYTHON_TYPES if has_json_type(value, kind))
        for part in self.listed_under("allOf"):
            if types := part.value_types():
                return types
        alternatives = [part.value_types() for part in self.listed_under(*_ALTERNATIVES)]
        return frozenset[str]().union(*alternatives) if all(alternatives) else frozenset()

    def listed_values(self) -> list[Any] | None:
        """Return all values that are allowed; None if the schema does not list them."""
        if (values := self._own_values) is not None:
            return values
        kind = self.schema.get("type")
        if isinstance(kind, str) and kind in _VALUES:
            return _VALUES[kind]
        all_values: list[Any] = []
        for part in self.listed_under(*_ALTERNATIVES):
            part_values = part.listed_values()
            if part_values is None:
                return None
            all_values += part_values
        return all_values or None

    def keywords(self) -> Iterator[str]:
        """Yield the keywords of the schema and of those that it combines."""
        yield from self.schema
        for part in self.listed_under(*_ALTERNATIVES, "allOf"):
            yield from part.keywords()

    @property
    def _own_values(self) -> list[Any] | None:
        """The values of the schema's own `const` or `enum`; None if it has neither."""
        values = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum")
        return values if isinstance(values, list) else None
