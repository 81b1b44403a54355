"""The first tokens of a long text, without tokenizing all of it: that takes a minute and gigabytes for some 10 MB.

Where a word ends, no token goes on, and what follows does not change the tokens before it. So the text is cut there, at
two places, and the tokens that are wanted must be the same for both. Where they are not, as in a run of letters that
only a longer token ends, the pieces grow.
"""

from __future__ import annotations

import re
from collections.abc import Callable

LONG = 1 << 16
"""Characters from which on a text is not tokenized as a whole at once."""

_CHARACTERS = 8
"""Characters for each of the wanted tokens, more than words have, so that the first pieces are mostly enough."""

_TRIES = 5
"""How often the two pieces may differ. After that the longer is taken, so that no text takes memory without bound."""

_WORD_END = re.compile(r"[A-Za-z](?= [A-Za-z])")

Encode = Callable[[str], list[int]]
"""Returns the tokens of a text without special tokens around it."""


def first_tokens(encode: Encode, text: str, most: int) -> list[int]:
    """Return the tokens of `text` if it has at most `most`, or is not LONG. Otherwise return more than `most` tokens,
    with which the text begins.
    """
    size, tries = max(LONG, _CHARACTERS * (most + 1)), 0
    while size < len(text):
        long = encode(_piece(text, size))
        if len(long) > most:
            short = encode(_piece(text, size * 3 // 4 - 1))
            tries += 1
            if tries == _TRIES or short[: most + 1] == long[: most + 1]:
                return long[: most + 1]
        size *= 2
    return encode(text)


def at_least(*texts: str) -> str:
    """Return what an error says before the number of tokens of texts that `first_tokens` may not have counted to the
    end, together and with a few characters around them.
    """
    return "at least " if sum(map(len, texts)) > LONG // 2 else ""


def _piece(text: str, most: int) -> str:
    """Return the beginning of a text, at most `most` characters, that ends at a word's end if there is one nearby."""
    ends = [match.end() for match in _WORD_END.finditer(text, most * 15 // 16, most)]
    return text[: ends[-1] if ends else most]
