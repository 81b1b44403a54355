"""Three quotes around a message of several lines: when they open a block, and when they close it."""

from __future__ import annotations

import re

QUOTES = '"""'

_SYSTEM = re.compile(r"^/(?:set\s+)?system\s+")

_LAST_BREAK = re.compile(r"\n[ \t]*\Z")
"""The line break before the closing quotes. An input line may have indented these quotes like the line above."""


def begins(text: str) -> bool:
    """Return whether `text`, or a system prompt in it, begins with three quotes."""
    return _body(text).startswith(QUOTES)


def is_open(text: str) -> bool:
    """Return whether `text` has opened a block and not closed it. A line that closes its own quotes opens none."""
    first, _, rest = _body(text).partition("\n")
    opened = first.startswith(QUOTES) and QUOTES not in first[len(QUOTES) :]
    return opened and not rest.rstrip().endswith(QUOTES)


def unquoted(text: str) -> str:
    """Return `text` without the three quotes around it; unchanged if they are not around all of it."""
    body = text.strip()
    first, _, rest = body.partition("\n")
    if not first.startswith(QUOTES):
        return text
    closed = first.find(QUOTES, len(QUOTES))
    if closed >= 0 and (rest or first[closed:].strip('"')):
        return text
    inside = body.removeprefix(QUOTES).removesuffix(QUOTES)
    return _LAST_BREAK.sub("", inside.removeprefix("\n"))


def quoted(text: str) -> str:
    """Return `text` as a block: `unquoted` gives it back."""
    return f"{QUOTES}\n{text}\n{QUOTES}"


def _body(text: str) -> str:
    return _SYSTEM.sub("", text.lstrip())


class TypedQuotes:
    """A tracker that tells typed quotes from quotes that were pasted, loaded by an editor or part of a draft. Only
    typed quotes open and close a block.
    """

    def __init__(self) -> None:
        self.begin("")

    def begin(self, draft: str) -> None:
        """Begin a new input line with this draft."""
        self._text, self._entry = draft, 0
        self._literal = begins(draft)
        self._ending = ""

    def changed(self, text: str, entry: int) -> None:
        """Note that the line now holds `text`. If the number of the history's `entry` differs, the text was recalled
        from the history, where blocks are closed.
        """
        before, self._text = self._text, text
        recalled, self._entry = entry != self._entry, entry
        typed = len(text) - len(before) == 1
        if recalled:
            self._literal, self._ending = False, ""
            return
        if not begins(text):
            self._literal = False
        elif not begins(before) and not typed:
            self._literal = True
        if not typed and text.rstrip() != before.rstrip():
            self._ending = text.rstrip()

    def is_open(self, text: str) -> bool:
        """Return whether Enter begins a new line of a block."""
        if self._literal:
            return False
        return is_open(text) or (text.rstrip() == self._ending and is_open(f"{text}."))

    def message(self, text: str) -> str:
        """Return `text` with quotes around it if its own first ones are a part of the message."""
        return quoted(text) if self._literal and text.lstrip().startswith(QUOTES) else text
