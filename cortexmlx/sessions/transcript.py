"""The tokens of a conversation. Each turn's tokens begin with those of the turn before, so the prefix cache hits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Encode = Callable[[str], Sequence[int]]
"""Returns the token ids of a rendered text, without any that a tokenizer adds."""

Cut = tuple[int, int]
"""A place where text and tokens can be split: after this many characters, which are this many tokens."""


@dataclass(frozen=True)
class Transcript:
    """A text that a model read and wrote, with its tokens as they were computed.

    A tokenizer need not make the model's own tokens from the model's text: the model may have written a word in other
    pieces, or half a character. So its tokens are kept, and a later text that begins alike continues them. It can leave
    this transcript only at one of the `cuts`: the ends of what was read and of what was written, (0, 0) first.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    cuts: tuple[Cut, ...] = ((0, 0),)

    def read(self, text: str, encode: Encode) -> Transcript:
        """Return the transcript of a text that the model is to read. As far as both texts agree, it has the tokens of
        this one.

        Some templates change earlier text (many leave out old thoughts). Then tokens are new from the last cut before
        the change on. They are also new if a tokenizer joins characters across a cut.
        """
        common = common_length(self.text, text)
        kept = [cut for cut in self.cuts if cut[0] <= common]
        while (new := _tokens_after(kept, text, encode)) is None:
            kept.pop()
        tokens = self.tokens[: kept[-1][1]] + new
        return Transcript(text, tokens, _with(kept, (len(text), len(tokens))))

    def wrote(self, text: str, tokens: Sequence[int]) -> Transcript:
        """Return this transcript followed by what the model wrote."""
        if not text:
            return self
        whole, ids = self.text + text, (*self.tokens, *tokens)
        return Transcript(whole, ids, _with(self.cuts, (len(whole), len(ids))))


def _tokens_after(cuts: Sequence[Cut], text: str, encode: Encode) -> tuple[int, ...] | None:
    """Return the tokens of `text` after the last cut; None if a token lies across it.

    The text is encoded from the cut before that one. So its beginning has the tokens that it has after other text, and
    a long conversation is not encoded as a whole at each turn.
    """
    place = cuts[-1][0]
    if place in (0, len(text)):
        return tuple(encode(text)) if not place else ()
    start = cuts[-2][0]
    both, before = list(encode(text[start:])), list(encode(text[start:place]))
    return tuple(both[len(before) :]) if both[: len(before)] == before else None


def _with(cuts: Sequence[Cut], cut: Cut) -> tuple[Cut, ...]:
    return tuple(cuts) if cut[0] == cuts[-1][0] else (*cuts, cut)


def common_length(one: str, other: str) -> int:
    """Return the length of the common beginning, found by comparing halves."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
