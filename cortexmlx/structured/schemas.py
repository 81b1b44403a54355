"""Closed schemas: objects with no other properties than those that the schema names."""

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

_SAYS_ITSELF = ("additionalProperties", "unevaluatedProperties")
"""Keywords by which an object says whether it may have other properties."""


def close_where_safe(schema: Any) -> Any:
    """Return a schema whose objects have no other properties than those it names. What fits it fits the original, too.

    An object stays as it is if it says itself whether it may have other properties, if it has no `properties`, or if
    they are named in several places (`allOf` and the like), each of which would forbid those of the others. So do
    alternatives of `oneOf` that an object may fit together.
    """
    return close(schema, _OpenNodes(schema).ids) if isinstance(schema, Mapping) else schema


def close_plain_objects(schema: Any) -> Any:
    """Return a schema as `close_where_safe` does, except that objects with `patternProperties` or with combinators of
    their own stay as they are, too.
    """
    if not isinstance(schema, Mapping):
        return schema
    combined = {id(node) for node in _within(schema) if not node.keys().isdisjoint(_COMBINING)}
    return close(schema, _OpenNodes(schema).ids | combined)


def close(schema: Any, unless: Set[int] = frozenset()) -> Any:
    """Return a copy of a schema, or of a part of it, with `additionalProperties: false` in each object that names its
    properties and says nothing of others, except those whose `id` is in `unless`.
    """
    if isinstance(schema, list):
        return [close(each, unless) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, Mapping):
            closed[name] = {key: close(each, unless) for key, each in value.items()}
        else:
            closed[name] = value if name in _UNTOUCHED else close(value, unless)
    lists = any(isinstance(schema.get(name), Mapping) for name in _LISTS)
    if lists and id(schema) not in unless and schema.keys().isdisjoint(_SAYS_ITSELF):
        closed["additionalProperties"] = False
    return closed


class _OpenNodes:
    """Finds the objects of a schema that cannot be closed. `ids` has the `id` of each."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self.ids: set[int] = set()
        for node in _within(root):
            self._check(node)

    def _check(self, node: Schema) -> None:
        """Keep an object open, or what else applies to it, if it would forbid what the others name."""
        groups = self._groups(node)
        listing = [group for group in groups if any(_names_some(part) for part in self._applied(group))]
        if _names_some(node) or len(listing) > 1:
            self._keep_open(part for group in groups for part in self._applied(group))
        own = _mapping(node, "properties").keys()
        named = _required(node).union(*map(self._names, groups))
        fewest = node.get("minProperties", 0)
        if not named <= own or (isinstance(fewest, int | float) and fewest > len(own)):
            self._keep_open([node])
        if any(not self._disjoint(*pair) for pair in combinations(_list(node, "oneOf"), 2)):
            self._keep_open(self._below(_list(node, "oneOf")))

    def _keep_open(self, nodes: Iterator[Schema] | list[Schema]) -> None:
        self.ids |= {id(node) for node in nodes}

    def _groups(self, node: Schema) -> list[list[Any]]:
        """Return the schemas that a value must fit besides. Of each group it may fit one only."""
        groups = [[part] for part in _list(node, "allOf")]
        groups += [_list(node, "anyOf"), _list(node, "oneOf")]
        groups += [[node[name]] for name in ("if", "then", "else") if name in node]
        groups += [[part] for name in ("dependentSchemas", "dependencies") for part in _mapping(node, name).values()]
        return [*groups, [target_of(node["$ref"], self._root)]] if "$ref" in node else groups

    def _applied(self, group: list[Any]) -> list[Schema]:
        """Return the schemas of a group, and those that apply to the same value because of them."""
        return self._reached(group, lambda node: [part for inner in self._groups(node) for part in inner])

    def _below(self, group: list[Any]) -> list[Schema]:
        """Return the schemas of a group, and all that they contain or refer to."""

        def next_of(node: Schema) -> list[Any]:
            return [*_within(node), target_of(node["$ref"], self._root)] if "$ref" in node else list(_within(node))

        return self._reached(group, next_of)

    @staticmethod
    def _reached(group: list[Any], next_of: Any) -> list[Schema]:
        found: dict[int, Schema] = {}
        left = list(group)
        while left:
            part = left.pop()
            if isinstance(part, Mapping) and id(part) not in found:
                found[id(part)] = part
                left += next_of(part)
        return list(found.values())

    def _names(self, group: list[Any]) -> set[str]:
        """Return the properties that a group names. A pattern counts as a name that no property has."""
        names: set[str] = set()
        for part in self._applied(group):
            names |= _mapping(part, "properties").keys() | _required(part)
            names |= {f"/{pattern}/" for pattern in _mapping(part, "patternProperties")}
        return names

    def _disjoint(self, one: Any, other: Any) -> bool:
        """Return whether no value fits both, by their types or by a property that both require."""
        one, other = self._resolved(one), self._resolved(other)
        if _types(one).isdisjoint(_types(other)):
            return True
        for name in _required(one) & _required(other):
            listed, others = (_values(_mapping(schema, "properties").get(name)) for schema in (one, other))
            if listed and others and listed.isdisjoint(others):
                return True
        return False

    def _resolved(self, schema: Any) -> Schema:
        for _ in range(8):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                break
            schema = target_of(schema["$ref"], self._root)
        return schema if isinstance(schema, Mapping) else {}


def _within(value: Any) -> Iterator[Schema]:
    """Yield a schema and all that it contains."""
    if isinstance(value, list):
        for each in value:
            yield from _within(each)
    elif isinstance(value, Mapping):
        yield value
        for name, inner in value.items():
            if name in _BY_NAME and isinstance(inner, Mapping):
                for each in inner.values():
                    yield from _within(each)
            elif name not in _UNTOUCHED:
                yield from _within(inner)


_ALL_TYPES = frozenset({"object", "array", "string", "number", "boolean", "null"})


def _types(schema: Schema) -> Set[str]:
    """Return the types that a value of a schema may have."""
    said = schema.get("type")
    names = [said] if isinstance(said, str) else _list(schema, "type")
    known = {"number" if name == "integer" else name for name in names}
    return known if known and known <= _ALL_TYPES else _ALL_TYPES


def _values(schema: Any) -> set[str]:
    """Return the texts that a schema lists; none if it does not list texts only."""
    if not isinstance(schema, Mapping):
        return set()
    listed = [schema["const"]] if "const" in schema else _list(schema, "enum")
    return set(listed) if all(isinstance(value, str) for value in listed) else set()


def _names_some(schema: Schema) -> bool:
    return bool(_required(schema)) or any(name in schema for name in _LISTS)


def _required(schema: Schema) -> set[str]:
    return {name for name in _list(schema, "required") if isinstance(name, str)}


def _mapping(schema: Schema, name: str) -> Schema:
    value = schema.get(name)
    return value if isinstance(value, Mapping) else {}


def _list(schema: Schema, name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


# The escapes that JSON of a schema may have, so that a property has one spelling only.


PLAIN = '"\\bfnrt'
"""The letters of all escapes but `\\u`, as llguidance takes them."""

_CONTROL = re.compile(r"\\u00(?:[01]|7[fF])|\\x(?:[01]|7[fF])|\x7f")
"""A control character that has no escape but `\\u`, as JSON or a regular expression writes it."""


def allowed_escapes(schema: Mapping[str, Any]) -> str | None:
    """Return the letters of the escapes that JSON of `schema` may have; None: all of them.

    llguidance knows a property by its plain name. In an object that may have other properties, `\\u0061` would be one
    of those, though every reader takes it for the property `a`. So `\\u` is not allowed there. Only control characters
    need it. It stays allowed if the schema itself mentions such a character.
    """
    if not _has_open_object(schema) or _CONTROL.search(json.dumps(schema, ensure_ascii=False)):
        return None
    return PLAIN


def _has_open_object(schema: Mapping[str, Any]) -> bool:
    """Return whether an object has properties with schemas of their own, and may have others."""
    unseen: list[Any] = [schema]
    while unseen:
        part = unseen.pop()
        if isinstance(part, Mapping):
            named = part.get("properties") or part.get("patternProperties")
            if named and part.get("additionalProperties") is not False:
                return True
            unseen += part.values()
        elif isinstance(part, list | tuple):
            unseen += part
    return False


# The bound on `multipleOf`: its cost grows with the number, not with the length of a schema.


MOST_REMAINDERS = 100_000
"""The least common multiple of all `multipleOf` of a schema, times how often the schema says `multipleOf` or `$ref`, at
most. A grammar has a state for each remainder: 100,000 take about a second to compile, a million 7 to 40 s. Numbers
that hold for the same value are combined into their common multiple.
"""


def check_multiples(schema: object) -> None:
    """Raise InvalidRequest if the `multipleOf` of a schema would take too long to compile."""
    said = list(_multiples_and_references(schema))
    factors = [_digits(number) for number in said if number is not None]
    if not factors:
        return
    common = 1
    for factor in factors:
        common = lcm(common, factor)
        if common * len(said) > MOST_REMAINDERS:
            raise InvalidRequest(
                "`multipleOf` takes too long to enforce: the least common multiple of its numbers is "
                f"{min(common, 10**12):,} or more, in {len(said):,} places, and the product must be at most "
                f"{MOST_REMAINDERS:,}. Leave it out or take smaller numbers",
                field="structured",
            )


def _multiples_and_references(schema: object) -> Iterator[int | float | None]:
    """Yield the number of each `multipleOf`, and None for each `$ref`, wherever in the schema they are."""
    waiting: list[Any] = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            number = each.get("multipleOf")
            if isinstance(number, int | float) and not isinstance(number, bool):
                yield number
            if "$ref" in each:
                yield None
            waiting.extend(each.values())
        elif isinstance(each, list | tuple):
            waiting.extend(each)


def _digits(number: int | float) -> int:
    """Return a number without its decimal point and its zeros at the end, which cost nothing; 1 for what is none."""
    found = Decimal(repr(number))
    if not found.is_finite() or not found:
        return 1
    return abs(int("".join(map(str, found.as_tuple().digits)).rstrip("0")))


# References within a JSON schema.


def target_of(reference: object, schema: Mapping[str, Any]) -> object:
    """Return what a reference leads to within its own schema, by the JSON pointer after its `#`. None: nothing, or
    another document.
    """
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found: object = schema
    for name in unquote(reference[2:]).split("/") if len(reference) > 1 else ():
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


# JSON schemas of Python types, by pydantic, which is imported on first use.


def adapter_of(kind: Any) -> Any:
    """Return what reads JSON as a type."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def closed_schema_of(kind: Any) -> object:
    """Return the JSON schema of a type, whose objects have no other properties than those it names. Raises ValueError
    for what pydantic makes no schema of.
    """
    from pydantic import PydanticUserError

    try:
        return close(adapter_of(kind).json_schema())
    except (PydanticUserError, TypeError, NameError, ValueError, RecursionError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(first) from None


# What is a text: what UTF-8 can hold, without NULs.


NO_TEXT = "holds a NUL or half of a surrogate pair, which is no text"


def is_text(text: str) -> bool:
    """Return whether a text can be written in UTF-8, without NULs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
