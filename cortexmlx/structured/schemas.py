"""Closes JSON schemas: objects get no other properties than those that the schema names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Set
from decimal import Decimal
from itertools import combinations
from math import lcm
from typing import Any
from urllib.parse import unquote

from cortexmlx.errors import InvalidRequest

Schema = Mapping[str, Any]

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords whose values are schemas by names of the caller's."""

_UNTOUCHED = ("default", "const", "enum", "examples", "required", "x-guidance", "not", "if")
"""Keywords whose values are data, or schemas that mean something else once they are closed."""

_LISTS = ("properties", "patternProperties")
"""Keywords that list the properties of an object."""

_COMBINING = frozenset(
    ("patternProperties", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
)
"""Keywords by which an object says more of its properties than their names."""

_OWN_RULES = ("additionalProperties", "unevaluatedProperties")
"""Keywords by which an object says whether it may have other properties."""


def close_where_safe(schema: Any) -> Any:
    """Forbid unnamed properties in the objects of a schema where that is safe. Every value that fits the result fits
    the original, too.

    An object stays as it is if it says itself whether it may have other properties, if it has no `properties`, or if
    they are named in several places (`allOf` and the like), each of which would forbid those of the others. So do
    alternatives of `oneOf` that an object may fit together.
    """
    return close_objects(schema, _OpenNodes(schema).ids) if isinstance(schema, Mapping) else schema


def close_plain_objects(schema: Any) -> Any:
    """Forbid unnamed properties as `close_where_safe` does, but not beside `patternProperties`, `allOf` and so on."""
    if not isinstance(schema, Mapping):
        return schema
    combining_ids = {id(node) for node in _subschemas(schema) if not node.keys().isdisjoint(_COMBINING)}
    return close_objects(schema, _OpenNodes(schema).ids | combining_ids)


def close_objects(schema: Any, unless: Set[int] = frozenset()) -> Any:
    """Return a copy of a schema, or of a part of it, with `additionalProperties: false` in each object that names its
    properties and says nothing of others. Objects whose `id` is in `unless` stay as they are.
    """
    if isinstance(schema, list):
        return [close_objects(each, unless) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, Mapping):
            closed[name] = {key: close_objects(each, unless) for key, each in value.items()}
        else:
            closed[name] = value if name in _UNTOUCHED else close_objects(value, unless)
    lists = any(isinstance(schema.get(name), Mapping) for name in _LISTS)
    if lists and id(schema) not in unless and schema.keys().isdisjoint(_OWN_RULES):
        closed["additionalProperties"] = False
    return closed


class _OpenNodes:
    """Finds the objects of a schema that cannot be closed safely. `ids` has the `id` of each."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self.ids: set[int] = set()
        for node in _subschemas(root):
            self._check_object(node)

    def _check_object(self, node: Schema) -> None:
        """Keep an object schema open if closing it would forbid properties that a schema for the same value names."""
        groups = self._combined_groups(node)
        naming_groups = [
            group for group in groups if any(_names_properties(part) for part in self._applied_schemas(group))
        ]
        if _names_properties(node) or len(naming_groups) > 1:
            self._keep_open(part for group in groups for part in self._applied_schemas(group))
        own_names = _mapping_at(node, "properties").keys()
        all_names = _required_properties(node).union(*map(self._named_properties, groups))
        min_properties = node.get("minProperties", 0)
        if not all_names <= own_names or (isinstance(min_properties, int | float) and min_properties > len(own_names)):
            self._keep_open([node])
        if any(not self._are_disjoint(*pair) for pair in combinations(_list_at(node, "oneOf"), 2)):
            self._keep_open(self._contained_schemas(_list_at(node, "oneOf")))

    def _keep_open(self, nodes: Iterator[Schema] | list[Schema]) -> None:
        """Add schemas to those that must stay open."""
        self.ids |= {id(node) for node in nodes}

    def _combined_groups(self, node: Schema) -> list[list[Any]]:
        """Return groups of schemas that a node combines (`allOf`, `$ref`...). A value need fit only one per group."""
        groups = [[part] for part in _list_at(node, "allOf")]
        groups += [_list_at(node, "anyOf"), _list_at(node, "oneOf")]
        groups += [[node[name]] for name in ("if", "then", "else") if name in node]
        groups += [[part] for name in ("dependentSchemas", "dependencies") for part in _mapping_at(node, name).values()]
        return [*groups, [resolve_pointer(node["$ref"], self._root)]] if "$ref" in node else groups

    def _applied_schemas(self, group: list[Any]) -> list[Schema]:
        """Return the schemas of a group, and those that they apply to the same value."""
        return self._reachable(
            group, lambda node: [part for subgroup in self._combined_groups(node) for part in subgroup]
        )

    def _contained_schemas(self, group: list[Any]) -> list[Schema]:
        """Return the schemas of a group, and all that they contain or refer to."""

        def get_successors(node: Schema) -> list[Any]:
            return (
                [*_subschemas(node), resolve_pointer(node["$ref"], self._root)]
                if "$ref" in node
                else list(_subschemas(node))
            )

        return self._reachable(group, get_successors)

    @staticmethod
    def _reachable(group: list[Any], get_successors: Any) -> list[Schema]:
        """Return the schemas of a group, and all that `get_successors` leads to from them."""
        schemas_by_id: dict[int, Schema] = {}
        stack = list(group)
        while stack:
            part = stack.pop()
            if isinstance(part, Mapping) and id(part) not in schemas_by_id:
                schemas_by_id[id(part)] = part
                stack += get_successors(part)
        return list(schemas_by_id.values())

    def _named_properties(self, group: list[Any]) -> set[str]:
        """Return the properties that a group names. A pattern counts as a name that no property has."""
        names: set[str] = set()
        for part in self._applied_schemas(group):
            names |= _mapping_at(part, "properties").keys() | _required_properties(part)
            names |= {f"/{pattern}/" for pattern in _mapping_at(part, "patternProperties")}
        return names

    def _are_disjoint(self, first: Any, second: Any) -> bool:
        """Return whether no value fits both schemas, by their types or by a property that both require."""
        first, second = self._resolve_reference(first), self._resolve_reference(second)
        if _json_types(first).isdisjoint(_json_types(second)):
            return True
        for name in _required_properties(first) & _required_properties(second):
            first_texts, second_texts = (
                _listed_texts(_mapping_at(schema, "properties").get(name)) for schema in (first, second)
            )
            if first_texts and second_texts and first_texts.isdisjoint(second_texts):
                return True
        return False

    def _resolve_reference(self, schema: Any) -> Schema:
        """Return the schema that a `$ref` leads to; an empty one if it leads nowhere."""
        for _ in range(8):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                break
            schema = resolve_pointer(schema["$ref"], self._root)
        return schema if isinstance(schema, Mapping) else {}


def _subschemas(value: Any) -> Iterator[Schema]:
    """Yield a schema and all schemas that it contains."""
    if isinstance(value, list):
        for each in value:
            yield from _subschemas(each)
    elif isinstance(value, Mapping):
        yield value
        for name, child in value.items():
            if name in _BY_NAME and isinstance(child, Mapping):
                for each in child.values():
                    yield from _subschemas(each)
            elif name not in _UNTOUCHED:
                yield from _subschemas(child)


_ALL_TYPES = frozenset({"object", "array", "string", "number", "boolean", "null"})


def _json_types(schema: Schema) -> Set[str]:
    """Return the JSON types that a value of a schema may have."""
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else _list_at(schema, "type")
    types = {"number" if name == "integer" else name for name in names}
    return types if types and types <= _ALL_TYPES else _ALL_TYPES


def _listed_texts(schema: Any) -> set[str]:
    """Return the texts that a schema lists by `const` or `enum`; empty if it lists other values."""
    if not isinstance(schema, Mapping):
        return set()
    values = [schema["const"]] if "const" in schema else _list_at(schema, "enum")
    return set(values) if all(isinstance(value, str) for value in values) else set()


def _names_properties(schema: Schema) -> bool:
    """Return whether a schema names any properties."""
    return bool(_required_properties(schema)) or any(name in schema for name in _LISTS)


def _required_properties(schema: Schema) -> set[str]:
    return {name for name in _list_at(schema, "required") if isinstance(name, str)}


def _mapping_at(schema: Schema, name: str) -> Schema:
    """Return the mapping under a keyword of a schema; an empty one if there is none."""
    value = schema.get(name)
    return value if isinstance(value, Mapping) else {}


def _list_at(schema: Schema, name: str) -> list[Any]:
    """Return the list under a keyword of a schema; an empty one if there is none."""
    value = schema.get(name)
    return value if isinstance(value, list) else []


# The escapes that JSON of a schema may have, so that a property has one spelling only.


SIMPLE_ESCAPES = '"\\bfnrt'
"""The letters of all escapes but `\\u`, as llguidance takes them."""

_CONTROL = re.compile(r"\\u00(?:[01]|7[fF])|\\x(?:[01]|7[fF])|\x7f")
"""A control character that has no escape but `\\u`, as JSON or a regular expression writes it."""


def allowed_escapes(schema: Mapping[str, Any]) -> str | None:
    """Return the escape letters (such as n) that strings in JSON of `schema` may use; None if all are allowed.

    llguidance knows a property by its plain name. In an object that may have other properties, `\\u0061` would be one
    of those, though every reader takes it for the property `a`. So `\\u` is not allowed there. Only control characters
    need it. It stays allowed if the schema itself mentions such a character.
    """
    if not _has_open_object(schema) or _CONTROL.search(json.dumps(schema, ensure_ascii=False)):
        return None
    return SIMPLE_ESCAPES


def _has_open_object(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema has an object with named properties that may have others, too."""
    stack: list[Any] = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, Mapping):
            properties = part.get("properties") or part.get("patternProperties")
            if properties and part.get("additionalProperties") is not False:
                return True
            stack += part.values()
        elif isinstance(part, list | tuple):
            stack += part
    return False


# The bound on `multipleOf`: its cost grows with the number, not with the length of a schema.


MAX_REMAINDERS = 100_000
"""The least common multiple of all `multipleOf` of a schema, times how often the schema says `multipleOf` or `$ref`, at
most. A grammar has a state for each remainder: 100,000 take about a second to compile, a million 7 to 40 s. Numbers
that hold for the same value are combined into their common multiple.
"""


def check_multiples(schema: object) -> None:
    """Raise InvalidRequest if a schema's `multipleOf` would take too long to compile."""
    occurrences = list(_multiples_and_references(schema))
    factors = [_significant_digits(number) for number in occurrences if number is not None]
    if not factors:
        return
    common = 1
    for factor in factors:
        common = lcm(common, factor)
        if common * len(occurrences) > MAX_REMAINDERS:
            raise InvalidRequest(
                "`multipleOf` takes too long to enforce: the least common multiple of its numbers is "
                f"{min(common, 10**12):,} or more, in {len(occurrences):,} places, and the product must be at most "
                f"{MAX_REMAINDERS:,}. Leave it out or take smaller numbers",
                field="structured",
            )


def _multiples_and_references(schema: object) -> Iterator[int | float | None]:
    """Yield the number of each `multipleOf` in a schema, and None for each `$ref`."""
    stack: list[Any] = [schema]
    while stack:
        each = stack.pop()
        if isinstance(each, Mapping):
            number = each.get("multipleOf")
            if isinstance(number, int | float) and not isinstance(number, bool):
                yield number
            if "$ref" in each:
                yield None
            stack.extend(each.values())
        elif isinstance(each, list | tuple):
            stack.extend(each)


def _significant_digits(number: int | float) -> int:
    """Return a number's significant digits as an integer: 12 for 0.0120 and for 1,200; 1 for 0, infinity and NaN."""
    decimal_value = Decimal(repr(number))
    if not decimal_value.is_finite() or not decimal_value:
        return 1
    return abs(int("".join(map(str, decimal_value.as_tuple().digits)).rstrip("0")))


# References within a JSON schema.


def resolve_pointer(reference: object, schema: Mapping[str, Any]) -> object:
    """Return what a `$ref`'s JSON pointer leads to in its own schema; None if it is nothing or in another document."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    target: object = schema
    for name in unquote(reference[2:]).split("/") if len(reference) > 1 else ():
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list):
            target = target[int(name)] if name.isdecimal() and int(name) < len(target) else None
        else:
            target = target.get(name) if isinstance(target, Mapping) else None
    return target


# JSON schemas of Python types, by pydantic, which is imported on first use.


def type_adapter(kind: Any) -> Any:
    """Return pydantic's TypeAdapter of a type, which reads JSON as that type."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def closed_type_schema(kind: Any) -> object:
    """Return a Python type's JSON schema, closed by `close_objects`. Raises ValueError if pydantic makes none of it."""
    from pydantic import PydanticUserError

    try:
        return close_objects(type_adapter(kind).json_schema())
    except (PydanticUserError, TypeError, NameError, ValueError, RecursionError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(first) from None


# What is a text: what UTF-8 can hold, without NULs.


NO_TEXT = "holds a NUL or half of a surrogate pair, which is no text"


def is_text(text: str) -> bool:
    """Return whether a text can be written in UTF-8 and has no NULs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
