"""Error messages for clients: quoted input is shortened, and library panics and local file paths are removed.

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

_MAX_MESSAGE = 1000
_MAX_QUOTED = 120
"""Characters of all that a message quotes."""
_MAX_FIELD = 80
_MAX_SEARCHED = 20_000

_QUOTED = re.compile(r"""(?<![^\s(\[{:,=])(['"])((?:\\.|(?!\1)[^\\])*)\1(?=[\s)\]}:,;.?]|$)""", re.DOTALL)
_UNBROKEN = re.compile(rf"\S{{{_MAX_QUOTED + 1},}}")
_PATH = re.compile(r"(?<![\w:/.~])~?(?:/[\w.@+~-]+)+/([\w.@+~-]*)")
_PANIC = re.compile(
    r"<backtrace>|stack backtrace|\bpanick|\bpanic\b[:!]|PanicException|RUST_BACKTRACE|\w\.rs:\d|::\w+\(\)|"
    r'Traceback \(most recent|File "[^"]*", line \d',
    re.IGNORECASE,
)
_OWN_PANIC = re.compile(rf"{_PANIC.pattern}|panic|backtrace|\brust\b", re.IGNORECASE)
"""The same in an error that quotes nothing of a client."""
_COMMAND_OPTIONS = re.compile(r" \((?:\w+=, )?--[a-z-]+\)|, --[a-z-]+(?=\))")
"""The options that messages name, in parentheses."""


def error_text(error: CortexError, *, options: bool = False) -> str:
    """Return an error's text for a client. Advice on command-line options is left out unless `options`."""
    text = _cut_huge_text(str(error))
    text = text if options else _COMMAND_OPTIONS.sub("", text)
    from_client = isinstance(error, InvalidRequest)
    if match := (_PANIC if from_client else _OWN_PANIC).search(text):
        prefix = text[: match.start()].rpartition(":")[0] or ("the request" if from_client else "an unexpected error")
        text = f"{prefix}: a library that reads it gave up" if from_client else f"{prefix}: see the server's log"
    return shorten_message(text if from_client else _PATH.sub(r"\1", text))


def error_field(error: CortexError) -> str | None:
    """Return the JSON path of the field that an InvalidRequest names, shortened; None if there is none."""
    return _cut_middle(error.field, _MAX_FIELD) if isinstance(error, InvalidRequest) and error.field else None


def shorten_message(text: str) -> str:
    """Shorten the quoted texts in a message, and then cut its middle out if it is still too long."""
    remaining = _MAX_QUOTED

    def shorten_quote(quoted_text: str) -> str:
        nonlocal remaining
        shortened, remaining = _cut_middle(quoted_text, remaining), max(0, remaining - len(quoted_text))
        return shortened

    text = _QUOTED.sub(lambda found: f"{found[1]}{shorten_quote(found[2])}{found[1]}", _cut_huge_text(text))
    return _cut_middle(_UNBROKEN.sub(lambda found: shorten_quote(found[0]), text), _MAX_MESSAGE)


def _cut_huge_text(text: str) -> str:
    """Cut the middle out of a text of megabytes, so that regular expressions stay fast."""
    return text if len(text) <= _MAX_SEARCHED else f"{text[: _MAX_SEARCHED // 2]}...{text[-_MAX_SEARCHED // 2 :]}"


def _cut_middle(text: str, max_length: int) -> str:
    """Cut the middle out of a text that is longer than `max_length` characters."""
    if len(text) <= max_length:
        return text
    half = max(0, max_length - 5) // 2
    return f"{text[:half]} ... {text[len(text) - half :]}" if half else "..."


# What a reader left out or changed of a body. Each kind is logged once, and what matters is a note of the reply.


log = logging.getLogger("cortexmlx")

_NOTES: ContextVar[dict[str, str] | None] = ContextVar("notes", default=None)
"""The notes of the body that is being read, by kind; None: nobody asks for them."""

_logged_kinds: set[str] = set()
"""The kinds that were logged. They are words of ours, so their number has a bound."""


def warn_once(kind: str, text: str) -> None:
    """Warn of an ignored or changed part of a request, once per `kind` and process: agents repeat it every time."""
    if kind not in _logged_kinds:
        _logged_kinds.add(kind)
        log.warning("%s. This is said once.", text)


def add_note(kind: str, text: str) -> None:
    """Add a note about a changed request to the reply, and warn once in the log. A reply has one note of each kind."""
    notes = _NOTES.get()
    if notes is not None:
        notes.setdefault(kind, text)
    warn_once(kind, text)


@contextmanager
def collect_notes() -> Iterator[dict[str, str]]:
    """Collect the notes (see `add_note`) of the body that is read inside this context, by kind."""
    notes: dict[str, str] = {}
    token = _NOTES.set(notes)
    try:
        yield notes
    finally:
        _NOTES.reset(token)
