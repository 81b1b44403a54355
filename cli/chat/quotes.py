"""Messages of several lines: three quotes begin and end one."""

from __future__ import annotations

import re

QUOTES = '"""'

_SYSTEM = re.compile(r"^/(?:set\s+)?system\s+")

_LAST_BREAK = re.compile(r"\n[ \t]*\Z")
"""The line break before the closing quotes. An input line may have indented these quotes like the line above."""


def starts_block(text: str) -> bool:
    """Return whether `text`, or a system prompt in it, begins with three quotes."""
    return _without_command(text).startswith(QUOTES)


def is_open_block(text: str) -> bool:
    """Return whether `text` begins a block and does not end it. A line that closes its own quotes begins none."""
    first, _, rest = _without_command(text).partition("\n")
    opens_block = first.startswith(QUOTES) and QUOTES not in first[len(QUOTES) :]
    return opens_block and not rest.rstrip().endswith(QUOTES)


def strip_quotes(text: str) -> str:
    """Return `text` without the three quotes around it; unchanged if they do not enclose all of it."""
    body = text.strip()
    first, _, rest = body.partition("\n")
    if not first.startswith(QUOTES):
        return text
    closed = first.find(QUOTES, len(QUOTES))
    if closed >= 0 and (rest or first[closed:].strip('"')):
        return text
    inside = body.removeprefix(QUOTES).removesuffix(QUOTES)
    return _LAST_BREAK.sub("", inside.removeprefix("\n"))


def add_quotes(text: str) -> str:
    """Return `text` as a block in three quotes; `strip_quotes` undoes it."""
    return f"{QUOTES}\n{text}\n{QUOTES}"


def _without_command(text: str) -> str:
    """Return `text` without a leading command /system."""
    return _SYSTEM.sub("", text.lstrip())


class TypedQuotes:
    """Distinguishes typed quotes, which begin or end a block, from those that were pasted or came in a draft."""

    def __init__(self) -> None:
        self.begin("")

    def begin(self, draft: str) -> None:
        """Begin a new input line with this draft."""
        self._text, self._entry = draft, 0
        self._literal = starts_block(draft)
        self._pasted_text = ""

    def update(self, text: str, entry: int) -> None:
        """Track the line's new `text`. A new `entry` (history number) means a recalled text; its blocks are closed."""
        previous_text, self._text = self._text, text
        is_recalled, self._entry = entry != self._entry, entry
        is_typed = len(text) - len(previous_text) == 1
        if is_recalled:
            self._literal, self._pasted_text = False, ""
            return
        if not starts_block(text):
            self._literal = False
        elif not starts_block(previous_text) and not is_typed:
            self._literal = True
        if not is_typed and text.rstrip() != previous_text.rstrip():
            self._pasted_text = text.rstrip()

    def is_open(self, text: str) -> bool:
        """Return whether Enter adds a line to an open block instead of sending the message."""
        if self._literal:
            return False
        return is_open_block(text) or (text.rstrip() == self._pasted_text and is_open_block(f"{text}."))

    def protect_quotes(self, text: str) -> str:
        """Return `text`, quoted once more if its first quotes are part of the message."""
        return add_quotes(text) if self._literal and text.lstrip().startswith(QUOTES) else text
