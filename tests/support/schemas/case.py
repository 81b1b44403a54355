"""A schema with documents that fit it and documents that do not."""

from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    """`valid` documents have their properties in the order of the schema, as an answer has them."""

    name: str
    schema: dict[str, Any]
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]


def closed(properties: dict[str, Any], *optional: str, **keywords: Any) -> dict[str, Any]:
    """An object with these properties only. All of them are required but the `optional` ones."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **keywords,
    }
