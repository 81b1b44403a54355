"""JSON schemas of Python types, by pydantic, which is imported on first use."""

from __future__ import annotations

from typing import Any


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
        return _closed(adapter_of(kind).json_schema())
    except (PydanticUserError, TypeError, NameError, ValueError, RecursionError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(first) from None


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have no other properties than those it names."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, dict):
            closed[name] = {key: _closed(each) for key, each in value.items()}
        else:
            closed[name] = value if name in _VALUES else _closed(value)
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords of a schema whose values are schemas by names of the caller's."""

_VALUES = ("default", "const", "enum", "examples")
"""Keywords of a schema whose values are data and not schemas."""
