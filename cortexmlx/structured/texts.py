"""What is a text: what UTF-8 can hold, without NULs."""

from __future__ import annotations

NO_TEXT = "holds a NUL or half of a surrogate pair, which is no text"


def is_text(text: str) -> bool:
    """Return whether a text can be written in UTF-8, without NULs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
