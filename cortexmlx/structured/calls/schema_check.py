"""Checks a call's arguments against the schema of its tool, with an upper bound of the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cortexmlx.structured.calls.argument import dumped, fits, resolved

Schema = Mapping[str, Any]

MOST_STEPS = 20_000
"""How many pairs of a value and a schema are compared: some 20 ms on the engine's thread. The rest is not checked."""

_LIMITS: tuple[tuple[str, Callable[[Any, Any], bool], tuple[type, ...]], ...] = (
    ("minimum", lambda value, limit: value >= limit, (int, float)),
    ("maximum", lambda value, limit: value <= limit, (int, float)),
    ("exclusiveMinimum", lambda value, limit: value > limit, (int, float)),
    ("exclusiveMaximum", lambda value, limit: value < limit, (int, float)),
    ("minLength", lambda value, limit: len(value) >= limit, (str,)),
    ("maxLength", lambda value, limit: len(value) <= limit, (str,)),
    ("minItems", lambda value, limit: len(value) >= limit, (list,)),
    ("maxItems", lambda value, limit: len(value) <= limit, (list,)),
)
"""Keywords with a limit, what it means, and the types that it is for."""


def misfit(value: object, schema: Schema) -> str:
    """Return why a value does not fit a schema; empty if it does. `pattern`, `format`, `multipleOf` and `not` are not
    checked: an expression of a stranger may take any time.
    """
    try:
        return _Check(schema).misfit(value, schema, "the arguments")
    except RecursionError:
        return ""


class _Check:
    """One check against a whole schema, in which references are looked up."""

    def __init__(self, whole: Schema) -> None:
        self._whole = whole
        self._steps = 0

    def misfit(self, value: object, schema: object, place: str) -> str:
        self._steps += 1
        if self._steps > MOST_STEPS or schema is True:
            return ""
        if schema is False:
            return f"{place} must not be there"
        own = resolved(schema, self._whole)
        if not own:
            return ""
        return (
            self._other_type(value, own, place)
            or self._beyond(value, own, place)
            or self._of_parts(value, own, place)
            or self._of_ways(value, own, place)
        )

    def _other_type(self, value: object, schema: Schema, place: str) -> str:
        said = schema.get("type")
        kinds = [said] if isinstance(said, str) else said if isinstance(said, list) else []
        if kinds and not any(isinstance(kind, str) and _is(value, kind) for kind in kinds):
            return f"{place} is {_shown(value)}, but must be of the type {' or '.join(map(str, kinds))}"
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(listed, list):
            self._steps += len(listed)
            if not any(_same(value, each) for each in listed):
                return f"{place} is {_shown(value)}, which is none of the values that are listed"
        return ""

    def _beyond(self, value: object, schema: Schema, place: str) -> str:
        for keyword, holds, kinds in _LIMITS:
            limit = schema.get(keyword)
            limited = _is(limit, "number") and isinstance(value, kinds) and not isinstance(value, bool)
            if limited and not holds(value, limit):
                return f"{place} is {_shown(value)}, against {keyword} {limit}"
        return ""

    def _of_parts(self, value: object, schema: Schema, place: str) -> str:
        if isinstance(value, dict):
            return self._of_object(value, schema, place)
        items = schema.get("items", True)
        before = schema.get("prefixItems")
        before = before if isinstance(before, list) else []
        for number, item in enumerate(value if isinstance(value, list) else ()):
            part = before[number] if number < len(before) else items
            if self._steps > MOST_STEPS or (part is True and number >= len(before)):
                break
            if why := self.misfit(item, part, f"{place}[{number}]"):
                return why
        return ""

    def _of_object(self, value: dict[str, Any], schema: Schema, place: str) -> str:
        required = schema.get("required")
        for name in required if isinstance(required, list) else ():
            if isinstance(name, str) and name not in value:
                return f"{name!r:.80} of {place} is missing"
        known = schema.get("properties")
        known = known if isinstance(known, Mapping) else {}
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        for name, inner in value.items():
            part = known.get(name, others)
            if part is False and name not in known:
                return f"{name!r:.80} is not a part of {place}"
            if why := self.misfit(inner, part, f"{name!r:.80}"):
                return why
        return ""

    def _of_ways(self, value: object, schema: Schema, place: str) -> str:
        parts = schema.get("allOf")
        for part in parts if isinstance(parts, list) else ():
            if why := self.misfit(value, part, place):
                return why
        for keyword in ("anyOf", "oneOf"):
            ways = schema.get(keyword)
            if isinstance(ways, list) and ways and all(self.misfit(value, way, place) for way in ways):
                return f"{place} is {_shown(value)}, which is none of what {keyword} allows"
        return ""


def _is(value: object, kind: str) -> bool:
    return fits(value, kind) or (kind == "integer" and isinstance(value, float) and value.is_integer())


def _same(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _shown(value: object) -> str:
    text = dumped(value) if not isinstance(value, dict | list) else repr(type(value).__name__)
    return text if len(text) <= 80 else f"{text[:80]}..."
