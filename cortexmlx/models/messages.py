"""Foreign exceptions inside our own messages."""

from __future__ import annotations

_LONGEST = 300


def one_line(error: Exception) -> str:
    """What `error` says, on one line and not endless; its type where it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
