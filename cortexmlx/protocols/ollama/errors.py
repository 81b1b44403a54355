"""Errors of Ollama's API: a body with one text, also as the last line of a stream."""

from __future__ import annotations

import re

from cortexmlx.errors import CortexError
from cortexmlx.protocols.error_text import error_field, error_text
from cortexmlx.protocols.request import Body

_PATH = re.compile(r"/api/(chat|generate|embed|embeddings|tags|show|ps|version|pull|push|create|copy|delete)/?$")


def is_ollama_path(path: str) -> bool:
    """Whether a URL path belongs to Ollama's API. The application may be mounted below another path."""
    return _PATH.search(path) is not None


def error_body(error: CortexError) -> Body:
    """Return the JSON body of an error. Its text names the wrong field, since the body has no field for that."""
    text, field = error_text(error), error_field(error)
    field = "format" if field == "structured" else field
    return {"error": text if field is None or field in text else f"{field}: {text}"}
