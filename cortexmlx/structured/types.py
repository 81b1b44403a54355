"""JSON schemas of Python types, by pydantic, which is imported on first use."""

from __future__ import annotations

from typing import Any

from cortexmlx.structured.closed import close


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
