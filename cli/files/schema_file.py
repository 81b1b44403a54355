"""Read the JSON schema of an option: the schema itself, or the name of its file."""

from __future__ import annotations

import json
import os
from pathlib import Path

from cortexmlx.errors import InvalidRequest
from cortexmlx.structured.output import MAX_CHARACTERS, StructuredOutput
from cortexmlx.structured.schemas import close_plain_objects


def parse_schema_option(text: str, *, is_open: bool = False) -> StructuredOutput:
    """Return the structured output for a schema that a user typed: JSON, the name of a file with it, or `json` for any
    object.

    Small models write properties and blanks until the last token. So JSON is compact, and an object whose schema only
    lists its properties has no others, unless `is_open`. Raises InvalidRequest.
    """
    form = _read_schema(text.strip())
    if is_open:
        return form
    try:
        return StructuredOutput.json(close_plain_objects(json.loads(form.definition)), compact=True)
    except RecursionError:
        raise InvalidRequest("the schema is nested too deep to be closed") from None


def _read_schema(text: str) -> StructuredOutput:
    """Return the structured output of a typed schema, or of the schema in the file that was typed."""
    if text == "json":
        return StructuredOutput.json()
    if not text or text.startswith("{"):
        return StructuredOutput.json(text)
    try:
        with Path(os.path.expanduser(text)).open("rb") as file:
            schema = file.read(4 * MAX_CHARACTERS + 1).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidRequest(f"{text} is no text in UTF-8") from None
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{text} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return StructuredOutput.json(schema)
