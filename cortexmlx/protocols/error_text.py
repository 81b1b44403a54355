"""What people are told of an error, whichever protocol, batch record or log says it: own words, and little of what was
sent.

Messages quote values of strangers, and words of libraries. A client gets at most 200 characters of what it sent. It
gets nothing of a library's panic, and no path of this machine.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from cortexmlx.errors import CortexError, InvalidRequest

_MOST = 1000
_MOST_QUOTED = 120
"""Characters of all that a message quotes."""
_MOST_FIELD = 80
_BULK = 20_000

_QUOTED = re.compile(r"""(?<![^\s(\[{:,=])(['"])((?:\\.|(?!\1)[^\\])*+)\1(?=[\s)\]}:,;.?]|$)""", re.DOTALL)
_UNBROKEN = re.compile(rf"\S{{{_MOST_QUOTED + 1},}}")
_PATH = re.compile(r"(?<![\w:/.~])~?(?:/[\w.@+~-]+)+/([\w.@+~-]*)")
_PANIC = re.compile(
    r"<backtrace>|stack backtrace|\bpanick|\bpanic\b[:!]|PanicException|RUST_BACKTRACE|\w\.rs:\d|::\w+\(\)|"
    r'Traceback \(most recent|File "[^"]*", line \d',
    re.IGNORECASE,
)
_PANIC_OF_OURS = re.compile(rf"{_PANIC.pattern}|panic|backtrace|\brust\b", re.IGNORECASE)
"""The same in an error that quotes nothing of a client."""
_OPTIONS = re.compile(r" \((?:\w+=, )?--[a-z-]+\)|, --[a-z-]+(?=\))")
"""The options that messages name, in parentheses."""


def error_text(error: CortexError, *, options: bool = False) -> str:
    """Return what a client is told of an error. Clients of a server have no command line, so its options are left out
    unless `options` is true.
    """
    text = _without_bulk(str(error))
    text = text if options else _OPTIONS.sub("", text)
    sent = isinstance(error, InvalidRequest)
    if found := (_PANIC if sent else _PANIC_OF_OURS).search(text):
        begun = text[: found.start()].rpartition(":")[0] or ("the request" if sent else "an unexpected error")
        text = f"{begun}: a library that reads it gave up" if sent else f"{begun}: see the server's log"
    return bounded(text if sent else _PATH.sub(r"\1", text))


def field_of(error: CortexError) -> str | None:
    """Return the path of the wrong field, if the error names one."""
    return _cut(error.field, _MOST_FIELD) if isinstance(error, InvalidRequest) and error.field else None


def bounded(text: str) -> str:
    """Return a message of which what is quoted is cut, and then the middle."""
    left = _MOST_QUOTED

    def shorter(said: str) -> str:
        nonlocal left
        kept, left = _cut(said, left), max(0, left - len(said))
        return kept

    text = _QUOTED.sub(lambda found: f"{found[1]}{shorter(found[2])}{found[1]}", _without_bulk(text))
    return _cut(_UNBROKEN.sub(lambda found: shorter(found[0]), text), _MOST)


def _without_bulk(text: str) -> str:
    """Return a text that is quick to search: a value of megabytes stays one value."""
    return text if len(text) <= _BULK else f"{text[: _BULK // 2]}...{text[-_BULK // 2 :]}"


def _cut(text: str, most: int) -> str:
    """Return a text without its middle if it is longer than `most`."""
    if len(text) <= most:
        return text
    half = max(0, most - 5) // 2
    return f"{text[:half]} ... {text[len(text) - half :]}" if half else "..."


# What a reader left out or changed of a body. Each kind is logged once, and what matters is a note of the reply.


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
