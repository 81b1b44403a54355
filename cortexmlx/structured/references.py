"""References within a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


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
