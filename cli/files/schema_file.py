"""A schema that a user has typed, or the name of its file."""

from __future__ import annotations

import os
from pathlib import Path

from cortexmlx.errors import InvalidRequest
from cortexmlx.structured.output import MOST_CHARACTERS, StructuredOutput


def form_of_schema(text: str) -> StructuredOutput:
    """Return the form of a schema that a user has typed: JSON, the name of a file with it, or `json` for any object.
    Raises InvalidRequest.
    """
    text = text.strip()
    if text == "json":
        return StructuredOutput.json()
    if text.startswith("{"):
        return StructuredOutput.json(text)
    try:
        with Path(os.path.expanduser(text)).open("rb") as file:
            schema = file.read(4 * MOST_CHARACTERS + 1).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidRequest(f"{text} is no text in UTF-8") from None
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{text} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return StructuredOutput.json(schema)
