"""Pieces of Lark grammars in llguidance's dialect: texts, special tokens, and free text up to a tag."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

Specials = Mapping[str, int]
"""The special tokens by the texts that tags write them as."""

ANY = r"(.|\n)*"
"""A regular expression of any text."""

BLANKS = r"[ \n\t\r]"
"""A regular expression of a blank beside a tag."""

MOST_BLANKS = 64
"""How many blanks belong to a tag at most."""


def tag(text: str, specials: Specials) -> str:
    """Return a tag as a part of a rule: texts in quotes, special tokens by their ids."""
    return " ".join(f"<[{part}]>" if isinstance(part, int) else quoted(part) for part in parts(text, specials))


def parts(text: str, specials: Specials) -> list[str | int]:
    """Return the texts and the special tokens that a tag is made of."""
    known = [special for special in specials if special and special in text]
    if not known:
        return [text]
    pieces = re.split(f"({'|'.join(map(re.escape, sorted(known, key=len, reverse=True)))})", text)
    return [specials.get(piece, piece) for piece in pieces if piece]


def up_to(name: str, close: str, specials: Specials, not_first: str = "") -> list[str]:
    """Return the rules of free text up to the tag `close`, with the tag. The first rule is called `name`. The text does
    not begin with `not_first`, not even after blanks.
    """
    first, *others = parts(close, specials)
    terminal = f"{name.upper()}_TEXT"
    if isinstance(first, int):  # who reads the text cannot tell a special token from its name in ordinary tokens
        known = max((special for special in specials if special and close.startswith(special)), key=len)
        return [f"{name}: {terminal} {tag(close, specials)}", f"{terminal}: {without(known, not_first)}"]
    begins = but_not(not_first)
    rest = tag(close[len(first) :], specials) if others else ""
    lazy = f"{name}_text[lazy]: {terminal}"
    return [f"{name}: {name}_text {rest}", lazy, f"{terminal}: /{ANY}{escaped(first)}/{begins}"]


def never_closed(name: str, close: str, specials: Specials) -> tuple[str, list[str]]:
    """Return free text without the tag `close`, as a part of a rule, and the rules that it needs besides those of
    `up_to` with this name.
    """
    if isinstance(parts(close, specials)[0], int):
        return f"{name.upper()}_TEXT", []
    return f"{name.upper()}_REST", [f"{name.upper()}_REST: {without(close)}"]


def without(text: str, not_first: str = "") -> str:
    """Return a terminal of free text that does not contain `text`, and does not begin with `not_first`, which may have
    blanks before it.
    """
    begins = but_not(not_first)
    return f"/{ANY}/ & ~/{ANY}{escaped(text)}{ANY}/{begins}"


def one_of(name: str, choices: Sequence[str]) -> list[str]:
    """Return the rules of one of several texts. The first rule is called `name`. They are one terminal: a rule cannot
    have more than some 2,000 ways.
    """
    terminal = f"{name.upper()}_CHOICE"
    return [f"{name}: {terminal}", f"{terminal}: {' | '.join(map(quoted, choices))}"]


def after_blanks(text: str, specials: Specials) -> str:
    """Return a tag that may have blanks before it, as a part of a rule. They are one terminal with the text that
    follows, so that a free text with which an answer may begin instead does not take them away from the tag.
    """
    first, *others = parts(text, specials)
    if isinstance(first, int):
        return f"/{BLANKS}{{1,{MOST_BLANKS}}}/? {tag(text, specials)}"
    rest = tag(text[len(first) :], specials) if others else ""
    return f"/{BLANKS}{{0,{MOST_BLANKS}}}{escaped(first)}/ {rest}"


def but_not(first: str) -> str:
    """Return the part of a terminal that excludes texts which begin with `first`, also after blanks; empty for an empty
    text.
    """
    return f" & ~/[\\s\\x1C-\\x1F]{{0,{MOST_BLANKS}}}{escaped(first)}{ANY}/" if first else ""


def quoted(text: str) -> str:
    """Return a text as a terminal."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Return a regular expression that matches a text, for use between slashes."""
    return "".join(f"\\{char}" if char in r"\.+*?()|[]{}^$/#&-~" else "\\n" if char == "\n" else char for char in text)
