"""A limit of thoughts: after so many tokens, the model is made to write the tag that closes them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cortexmlx.structured.matcher import Mask, only
from cortexmlx.structured.output import Thoughts

_MOST_SILENT = 3
"""How many tokens without text may come before the tag is forced. They are parts of a character, which has four bytes
at most.
"""

Encode = Callable[[str, bool], Sequence[int]]
"""Returns the tokens of a text, without those that a tokenizer adds if the flag is False."""


@dataclass(frozen=True)
class ThinkingLimit:
    """What limits the thoughts of one request. It is made on the thread that submits the request."""

    tokens: int
    """How many tokens the thoughts may have."""
    close: str
    """The tag that closes them."""
    close_tokens: tuple[int, ...]
    first: int
    """How many characters of the tag its first token has. If other tokens wrote fewer, the whole tag is forced: to a
    model, and to a grammar, a special token whose name is written out is no tag.
    """
    encode: Encode
    vocab_size: int

    @classmethod
    def of(cls, tokens: int | None, thoughts: Thoughts | None, encode: Encode, vocab_size: int) -> ThinkingLimit | None:
        """Return the limit of a request; None if there is none, or if the thoughts are not told apart."""
        if tokens is None or thoughts is None:
            return None
        close = thoughts.close
        written = tuple(encode(close, False))
        sizes = range(1, len(close))
        first = next((n for n in sizes if tuple(encode(close[:n], False)) == written[:1]), len(close))
        return cls(tokens, close, written, first, encode, vocab_size)


class Thinking(Protocol):
    """Where an answer is, while it grows: see `TextStream`."""

    @property
    def in_thoughts(self) -> bool:
        """Whether the next text belongs to the thoughts."""

    @property
    def thoughts_over(self) -> bool:
        """Whether the next text belongs to the answer."""

    @property
    def half_closed(self) -> int:
        """How many characters of the closing tag are written."""

    @property
    def silent(self) -> bool:
        """Whether the newest token added no text, for example as a part of a character."""


class ThinkingBudget:
    """The thoughts of one answer, and how many tokens are left for them.

    A token counts if the answer is in its thoughts before and after it. Tags do not count.
    """

    def __init__(self, limit: ThinkingLimit, text: Thinking) -> None:
        self._limit = limit
        self._text = text
        self._left = limit.tokens
        self._inside = text.in_thoughts
        self._forced: list[int] = []
        self._silent = 0
        self._over = False

    @property
    def due(self) -> bool:
        """Whether a token may have to be forced after the next one, which is not known yet."""
        return not self._over and (bool(self._forced) or self._left <= 1)

    @property
    def most_drafts(self) -> int:
        """How many next tokens may be drafted, so that the token after them need not be forced whatever they are."""
        return sys.maxsize if self._over else max(0, self._left - 1)

    def take(self, token: int) -> None:
        """Follow the answer's next token, after its text was taken."""
        if self._over:
            return
        inside, before = self._text.in_thoughts, self._inside
        self._inside = inside
        self._silent = self._silent + 1 if self._text.silent else 0
        if self._forced:
            del self._forced[0]
            self._over = not self._forced
        elif before and inside:
            self._left -= 1
        elif before or self._text.thoughts_over:
            self._over = True

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next: those of the closing tag that are not written. Often there are
        none.
        """
        if not self._over and not self._forced and self._spent:
            written = self._text.half_closed
            begun = written >= self._limit.first
            rest = self._limit.encode(self._limit.close[written:], False) if begun else self._limit.close_tokens
            self._forced = list(rest)
        return self._forced

    def masks(self) -> list[Mask]:
        """Return a mask for each of the `forced` tokens."""
        return [only(token, self._limit.vocab_size) for token in self.forced()]

    @property
    def _spent(self) -> bool:
        return self._inside and self._left <= 0 and not 0 < self._silent <= _MOST_SILENT
