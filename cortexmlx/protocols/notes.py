"""What a reader left out or changed of a body. Each kind is logged once, and what matters is a note of the reply."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

log = logging.getLogger("cortexmlx")

_NOTES: ContextVar[dict[str, str] | None] = ContextVar("notes", default=None)
"""The notes of the body that is being read, by kind; None: nobody asks for them."""

_logged: set[str] = set()
"""The kinds that were logged. They are words of ours, so their number has a bound."""


def tell_once(kind: str, text: str) -> None:
    """Log what was ignored, unless something of this kind was logged before: agents repeat it with every request."""
    if kind not in _logged:
        _logged.add(kind)
        log.warning("%s. This is said once.", text)


def note(kind: str, text: str) -> None:
    """Note in the reply, and once in the log, what was changed. A reply has one note of each kind."""
    notes = _NOTES.get()
    if notes is not None:
        notes.setdefault(kind, text)
    tell_once(kind, text)


@contextmanager
def noted() -> Iterator[dict[str, str]]:
    """Yield the notes of what is read in this context, by kind."""
    notes: dict[str, str] = {}
    token = _NOTES.set(notes)
    try:
        yield notes
    finally:
        _NOTES.reset(token)
