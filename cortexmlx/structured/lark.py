"""Makes parts of Lark grammars in llguidance's dialect: texts, special tokens, and free text up to a tag."""

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

MAX_BLANKS = 64
"""How many blanks belong to a tag at most."""


def tag_rule(text: str, specials: Specials) -> str:
    """Return the part of a rule that matches a tag: texts in quotes, special tokens by their ids."""
    return " ".join(f"<[{part}]>" if isinstance(part, int) else quote(part) for part in split_specials(text, specials))


def split_specials(text: str, specials: Specials) -> list[str | int]:
    """Split a tag into texts and the ids of special tokens."""
    matching_specials = [special for special in specials if special and special in text]
    if not matching_specials:
        return [text]
    parts = re.split(f"({'|'.join(map(re.escape, sorted(matching_specials, key=len, reverse=True)))})", text)
    return [specials.get(part, part) for part in parts if part]


def text_up_to_rules(name: str, close: str, specials: Specials, not_first: str = "", begin: str = "") -> list[str]:
    """Return the rules for free text that ends with the tag `close`. The first rule is called `name`. The text does
    not begin with `not_first`, not even after blanks. `begin` precedes it, and is optional before an empty text.
    """
    first, *other_parts = split_specials(close, specials)
    terminal = f"{name.upper()}_TEXT"
    if isinstance(first, int):  # who reads the text cannot tell a special token from its name in ordinary tokens
        close_special = max((special for special in specials if special and close.startswith(special)), key=len)
        return [
            f"{name}: {terminal} {tag_rule(close, specials)}",
            f"{terminal}: {text_without(close_special, not_first)}",
        ]
    begins = exclude_beginning(not_first)
    rest = tag_rule(close[len(first) :], specials) if other_parts else ""
    lazy = f"{name}_text[lazy]: {terminal}"
    text = f"({escape_regex(begin)}{ANY})?" if begin else ANY
    return [f"{name}: {name}_text {rest}", lazy, f"{terminal}: /{text}{escape_regex(first)}/{begins}"]


def unclosed_text_rules(name: str, close: str, specials: Specials) -> tuple[str, list[str]]:
    """Return a rule part for free text without the tag `close`, and the rules it needs beyond `text_up_to_rules`."""
    if isinstance(split_specials(close, specials)[0], int):
        return f"{name.upper()}_TEXT", []
    return f"{name.upper()}_REST", [f"{name.upper()}_REST: {text_without(close)}"]


def text_without(text: str, not_first: str = "") -> str:
    """Return a terminal for free text that neither contains `text`, nor begins with `not_first` (even after blanks)."""
    begins = exclude_beginning(not_first)
    return f"/{ANY}/ & ~/{ANY}{escape_regex(text)}{ANY}/{begins}"


def choice_rules(name: str, choices: Sequence[str]) -> list[str]:
    """Return rules for a choice of texts, the first named `name`. One terminal: a rule allows some 2,000 choices."""
    terminal = f"{name.upper()}_CHOICE"
    return [f"{name}: {terminal}", f"{terminal}: {' | '.join(map(quote, choices))}"]


def tag_after_blanks(text: str, specials: Specials) -> str:
    """Return the part of a rule that matches a tag, perhaps after blanks. The blanks share a terminal with the text of
    the tag. Otherwise, free text that may begin the answer instead of the tag would consume them.
    """
    first, *other_parts = split_specials(text, specials)
    if isinstance(first, int):
        return f"/{BLANKS}{{1,{MAX_BLANKS}}}/? {tag_rule(text, specials)}"
    rest = tag_rule(text[len(first) :], specials) if other_parts else ""
    return f"/{BLANKS}{{0,{MAX_BLANKS}}}{escape_regex(first)}/ {rest}"


def exclude_beginning(first: str) -> str:
    """Return a terminal part that excludes texts beginning with `first`, even after blanks; empty without `first`."""
    return f" & ~/[\\s\\x1C-\\x1F]{{0,{MAX_BLANKS}}}{escape_regex(first)}{ANY}/" if first else ""


def quote(text: str) -> str:
    """Quote a text as a terminal."""
    return json.dumps(text, ensure_ascii=False)


def escape_regex(text: str) -> str:
    """Escape a text for a regular expression between slashes."""
    return "".join(f"\\{char}" if char in r"\.+*?()|[]{}^$/#&-~" else "\\n" if char == "\n" else char for char in text)
