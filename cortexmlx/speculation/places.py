"""PlaceTable: where two tokens were followed by a third, in any text. Without mlx."""

from __future__ import annotations

from array import array
from os import urandom

import numpy as np

ORDER = 2
"""Tokens before a place that name it. With two, a draft begins one step earlier after a change than with three."""

WAYS = 8
"""The newest places that are kept of each set."""

_SETS = 1 << 16
"""A set is named by a hash of 16 bits, which numpy sorts by radix."""

_OFFSET_BITS = 24
_LAST_OFFSET = (1 << _OFFSET_BITS) - 1
_SHIFT = 15

HashKey = tuple[int, int]
"""Two odd numbers of 31 bits, by which the two tokens are multiplied."""


def new_hash_key() -> HashKey:
    """Return a key that nobody can guess."""
    first, second = (int.from_bytes(urandom(4), "little") >> 1 | 1 << 30 | 1 for _ in range(2))
    return first, second


class PlaceTable:
    """Keeps the newest places that follow the same two tokens, as a processor's cache keeps lines: a set of `WAYS`
    places for each hash, the newest first.

    A place is the number of a text and an offset into it. Places of texts that are gone stay until newer ones push them
    out, and tokens with the same hash share a set, so the caller compares the tokens. It takes 4 MB, whatever is added.

    All clients share the table, and each has a `HashKey`. With one hash for all, a client could fill the set of two
    tokens, and see by its drafts whether another one's text has them.
    """

    def __init__(self) -> None:
        self._places = np.zeros(_SETS * WAYS, np.int64)
        self._next = np.zeros(_SETS, np.uint8)
        """Which place of each set is the oldest, so that the next one takes it."""
        self._place_at, self._next_at = self._places.data, self._next.data

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._places.nbytes + self._next.nbytes

    def add(self, key: HashKey, number: int, tokens: array[int], offset: int) -> None:
        """Add one place: `offset` in the text `number`, whose tokens before it are known."""
        if offset <= _LAST_OFFSET:
            which = _set_of(key, tokens[offset - 2], tokens[offset - 1])
            way = self._next_at[which]
            self._place_at[which * WAYS + way] = number << _OFFSET_BITS | offset
            self._next_at[which] = (way + 1) % WAYS

    def add_range(self, key: HashKey, number: int, tokens: array[int], begin: int, end: int) -> None:
        """Add the places `begin .. end` of the text `number`, as `add` would one after the other."""
        end = min(end, _LAST_OFFSET + 1)
        if begin >= end:
            return
        text = np.frombuffer(tokens, np.int32)[begin - ORDER : end - 1].astype(np.int64)
        sets = ((text[:-1] * key[0] + text[1:] * key[1]) >> _SHIFT).astype(np.uint16)
        order = np.argsort(sets, kind="stable")
        sets = sets[order]
        starts = np.flatnonzero(np.r_[True, sets[1:] != sets[:-1]])
        counts = np.diff(starts, append=len(sets))
        ranks = np.arange(len(sets)) - np.repeat(starts, counts)
        newest = ranks >= np.repeat(counts, counts) - WAYS  # each way is written once
        ways = (self._next[sets] + ranks) % WAYS
        places = sets.astype(np.int64) * WAYS + ways
        self._places[places[newest]] = (number << _OFFSET_BITS) + begin + order[newest]
        changed = sets[starts]
        self._next[changed] = (self._next[changed] + counts) % WAYS

    def after(self, key: HashKey, first: int, second: int) -> list[int]:
        """Return the places that may follow these two tokens, the newest first. 0 is none."""
        which = _set_of(key, first, second)
        begin, way = which * WAYS, self._next_at[which]
        places = self._place_at[begin : begin + WAYS].tolist()
        return [*places[way - 1 :: -1], *places[: way - 1 : -1]] if way else places[::-1]


def text_of(place: int) -> int:
    """Return the number of a place's text."""
    return place >> _OFFSET_BITS


def offset_of(place: int) -> int:
    """Return a place's offset in its text."""
    return place & _LAST_OFFSET


def _set_of(key: HashKey, first: int, second: int) -> int:
    return (first * key[0] + second * key[1]) >> _SHIFT & (_SETS - 1)
