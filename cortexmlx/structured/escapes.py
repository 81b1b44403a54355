"""The escapes that JSON of a schema may have, so that a property has one spelling only."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

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
