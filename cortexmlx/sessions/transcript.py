"""The tokens of a conversation. Each turn's tokens begin with those of the turn before, so the prefix cache hits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Encode = Callable[[str], Sequence[int]]
"""The token ids of a rendered text, without any that a tokenizer adds."""

Cut = tuple[int, int]
"""A place where text and tokens can be parted: after so many characters, which are so many tokens."""


@dataclass(frozen=True)
class Transcript:
    """A text that a model read and wrote, and its tokens as they were computed.

    A model's own words need not have the tokens that a tokenizer makes of their text: it may have written a word in
    other pieces, or half a character. So they are kept, and a later text that begins alike goes on behind them. It
    may leave this one only at one of the `cuts`, the ends of what was read and of what was written, (0, 0) first.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    cuts: tuple[Cut, ...] = ((0, 0),)

    def read(self, text: str, encode: Encode) -> Transcript:
        """The transcript of a text that the model is to read, with the tokens of this one as far as both are alike.

        A template that changes what was said before (many leave out old thoughts) is followed: tokens are new from the
        last cut before the change on. So they are where a tokenizer joins what a cut parts.
        """
        common = _common_length(self.text, text)
        kept = [cut for cut in self.cuts if cut[0] <= common]
        while (new := _behind(kept, text, encode)) is None:
            kept.pop()
        tokens = self.tokens[: kept[-1][1]] + new
        return Transcript(text, tokens, _with(kept, (len(text), len(tokens))))

    def wrote(self, text: str, tokens: Sequence[int]) -> Transcript:
        """This one and what the model wrote behind it."""
        if not text:
            return self
        whole, ids = self.text + text, (*self.tokens, *tokens)
        return Transcript(whole, ids, _with(self.cuts, (len(whole), len(ids))))


def _behind(cuts: Sequence[Cut], text: str, encode: Encode) -> tuple[int, ...] | None:
    """The tokens of `text` behind the last cut; None if a token lies across it.

    It is encoded from the cut before, so that its beginning has the tokens that it has behind other text, and a long
    conversation is not encoded as a whole at each turn.
    """
    place = cuts[-1][0]
    if place in (0, len(text)):
        return tuple(encode(text)) if not place else ()
    start = cuts[-2][0]
    both, before = list(encode(text[start:])), list(encode(text[start:place]))
    return tuple(both[len(before) :]) if both[: len(before)] == before else None


def _with(cuts: Sequence[Cut], cut: Cut) -> tuple[Cut, ...]:
    return tuple(cuts) if cut[0] == cuts[-1][0] else (*cuts, cut)


def _common_length(one: str, other: str) -> int:
    """Length of the common beginning, found by comparing halves."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
