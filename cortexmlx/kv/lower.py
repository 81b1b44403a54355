"""The tier below the arena: which blocks go there, and which a prompt can have back. Knows neither files nor mlx.

What lies there are *pieces*: the block of an entry in one layer group, or the recurrent state behind an entry. A
piece's key is made of the entry's, so it stands for all text from the very beginning, too, and of the model's identity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from cortexmlx.kv.prefix import GONE, Entry, Key
from cortexmlx.kv.spec import LayerGroup

STATE = -1
"""In the place of a group: the recurrent state behind a block."""

START_SECONDS_PER_TOKEN = 1 / 2000
"""What computing a token of a prompt is taken for before one was computed."""

_READING_SECONDS = 0.001
"""What asking takes, however little is read."""

MOST_READ = 4 << 30
"""Bytes that are read for one prompt at once: it waits in memory beside the arena. What comes behind is computed."""

_MOST_LEAVING = 1 << 16
"""Entries that wait to be stored, at most."""


class Content(Protocol):
    """What a piece holds: the arrays of all its layers, as `execution/memory/transfer.py` arranges them."""

    @property
    def arrays(self) -> tuple[np.ndarray, ...]: ...


@dataclass(frozen=True)
class PieceLoad:
    """A piece that is to be brought into `target`: a block of `group`, or for `STATE` a snapshot."""

    group: int
    target: int
    content: Content


@dataclass(eq=False)
class DiskLoad:
    """A load of a prompt's blocks from the tier below, from the request to its result.

    Its owner requests it from a `LowerTier`, and sets `pieces` when they are read. All other fields stay as they are.
    So another thread may call `wanted` and `choose` meanwhile.
    """

    tier: LowerTier = field(repr=False)
    begin: int
    """The place of the first block that is asked for."""
    keys: tuple[Key, ...]
    """The keys of the entries of the blocks."""
    tokens: tuple[int, ...] = field(repr=False)
    """The tokens of the blocks, in order."""
    matched: int
    """How many tokens of the text are in memory."""
    seconds_per_token: float
    """What a token costs to compute."""
    pieces: Mapping[Key, Content] | None = field(default=None, repr=False)
    """What was read, by key; None while it is being read."""

    def wanted(self) -> dict[Key, tuple[int, ...]]:
        """All pieces that there may be, by key, each with its tokens."""
        size = self.tier.block_size
        contents = (self.tokens[i : i + size] for i in range(0, len(self.tokens), size))
        each = zip(self.keys, contents, strict=True)
        return {self.tier.piece_key(key, group): content for key, content in each for group in self.tier.every}

    def end(self, there: Collection[Key]) -> int:
        """The place up to which a text can begin with what is `there`, and with what is in memory."""
        last = self.begin + len(self.keys)
        chain = next((p for p in range(self.begin, last) if not self._has(there, p, self.tier.whole)), last)
        for end in range(chain, self.begin, -1):
            if all(self._has(there, place, (group,)) for place, group in self._needed(end) if place >= self.begin):
                return end
        return self.begin

    def choose(self, there: Mapping[Key, int], rate: float) -> list[Key]:
        """The pieces worth reading of those that are `there`, by their bytes, where `rate` bytes are read in a second:
        those that it takes to begin as far as can be, or none if computing them is faster.
        """
        end = self.end(there)
        keys = [self._key(place, group) for place, group in self._needed(end)]
        seconds = _READING_SECONDS + sum(there[key] for key in keys if key in there) / rate
        return keys if end > self.begin and seconds < self._seconds_to(end) else []

    @property
    def seconds(self) -> float:
        """The time to compute all that is asked for."""
        return self._seconds_to(self.begin + len(self.keys))

    @cached_property
    def loaded(self) -> int:
        """The place up to which a text can begin with what was read."""
        assert self.pieces is not None
        return self.end(self.pieces)

    def piece(self, place: int, group: int) -> Content:
        """A piece that was read."""
        assert self.pieces is not None
        return self.pieces[self._key(place, group)]

    def continues(self, tokens: Sequence[int], keys: Sequence[Key], blocks: int, most: int) -> bool:
        """Whether what was read continues the first `blocks` blocks of a text, known by `keys`, and ends within the
        first `most` tokens.
        """
        size = self.tier.block_size
        if (
            self.pieces is None
            or not self.begin <= blocks < self.loaded <= min(len(keys), most // size)
            or keys[self.loaded - 1] != self.keys[self.loaded - 1 - self.begin]
        ):
            return False
        begin, count = self.begin * size, (self.loaded - self.begin) * size
        return tuple(tokens[begin : begin + count]) == self.tokens[:count]

    def brings(self, keys: Sequence[Key], place: int) -> bool:
        """Whether the block at a place of a text, known by `keys`, is being read."""
        asked = self.pieces is None and self.begin <= place < min(len(keys), self.begin + len(self.keys))
        return asked and keys[place] == self.keys[place - self.begin]

    def _needed(self, end: int) -> Iterator[tuple[int, int]]:
        """Places and groups of the pieces that it takes to begin at a place, in order."""
        fronts = {group: self.tier.front(group, end) for group in range(len(self.tier.groups))}
        for place in range(self.begin, end):
            yield from ((place, group) for group, front in fronts.items() if place >= front)
        if self.tier.states:
            yield end - 1, STATE

    def _seconds_to(self, end: int) -> float:
        return (end * self.tier.block_size - self.matched) * self.seconds_per_token

    def _has(self, there: Collection[Key], place: int, groups: Sequence[int]) -> bool:
        return all(self._key(place, group) in there for group in groups)

    def _key(self, place: int, group: int) -> Key:
        return self.tier.piece_key(self.keys[place - self.begin], group)


class LowerTier:
    """What a `KVCache` tells the tier below, and asks of it by `ask`, which answers later. With `states` a text can
    be begun only where its recurrent state is, too. `dropped` is told of pieces that left before they were stored, and
    what it has not (`may_have` is False) is not asked for.

    `identity` names the model: 64 bytes at most, which other models do not have. While it is None, no piece has a key:
    nothing is asked for, and entries wait to be stored.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        block_size: int,
        states: bool,
        ask: Callable[[DiskLoad], None],
        identity: bytes | None,
        dropped: Callable[[int], None] = lambda pieces: None,
        may_have: Callable[[Key], bool] = lambda piece: True,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.states = states
        self.ask = ask
        self.identity = identity
        self.every = (*range(len(groups)), *((STATE,) if states else ()))
        self.whole = [g for g, group in enumerate(groups) if group.spec.attention_window.tokens is None]
        self._most_blocks = MOST_READ // max(1, sum(group.bytes_per_token for group in groups) * block_size)
        self._dropped = dropped
        self._may_have = may_have
        self._leaving: dict[Entry, None] = {}

    def front(self, group: int, place: int) -> int:
        """The place of the first block that the first token of a place sees."""
        return self.groups[group].spec.attention_window.first_block(place * self.block_size, self.block_size)

    def piece_key(self, entry: Key, group: int) -> Key:
        """The key of an entry's piece."""
        assert self.identity is not None
        return hashlib.blake2b(entry + b"%d" % group, key=self.identity, digest_size=16).digest()

    # -- down ---------------------------------------------------------------------------------------------------------

    def cached(self, entry: Entry) -> None:
        """An entry is cached, or has got what it lacked: it is to be stored before it leaves memory."""
        if len(entry.tokens) == self.block_size and any(True for _ in self.new_pieces(entry)):
            self._leaving[entry] = None
            if len(self._leaving) > _MOST_LEAVING:
                self._drop(self._next())

    def passed(self, entries: Iterable[Entry]) -> None:
        """The sequence that cached these goes on with another text: they are not worth storing."""
        for entry in entries:
            self._leaving.pop(entry, None)

    def leaving(self) -> Iterator[Entry]:
        """The entries that are to be stored, those first that were cached first. Whoever takes one says that it is
        `stored`.
        """
        while self._leaving:
            entry = self._next()
            if entry.forgotten:
                self._drop(entry)
            elif any(True for _ in self.new_pieces(entry)):
                yield entry

    def new_pieces(self, entry: Entry) -> Iterator[tuple[int, int]]:
        """The pieces of an entry that are not stored: each group, or `STATE`, with its block, or its snapshot."""
        for group, block in enumerate(entry.blocks):
            if block != GONE and group not in entry.below:
                yield group, block
        if self.block_size in entry.states and STATE not in entry.below:
            yield STATE, entry.states[self.block_size]

    @staticmethod
    def stored(entry: Entry, group: int) -> None:
        """A piece of an entry is below."""
        entry.below = entry.below | {group}

    def forget(self) -> None:
        """Nothing that is cached can be trusted."""
        self._leaving.clear()

    def __len__(self) -> int:
        """How many entries wait to be stored."""
        return len(self._leaving)

    def _next(self) -> Entry:
        entry = next(iter(self._leaving))
        del self._leaving[entry]
        return entry

    def _drop(self, entry: Entry) -> None:
        self._dropped(sum(1 for _ in self.new_pieces(entry)))

    # -- up -----------------------------------------------------------------------------------------------------------

    def request(
        self,
        tokens: Sequence[int],
        keys: Sequence[Key],
        blocks: int,
        matched: int,
        most: int,
        seconds_per_token: float | None,
    ) -> DiskLoad | None:
        """What a text would have from below that has its first `blocks` blocks, and `matched` tokens in all, in memory;
        None if there is no whole block in the rest. What lies behind its first `most` tokens is computed in any case,
        and so is what lies behind `MOST_READ` bytes.
        """
        if self.identity is None:
            return None
        end = min(len(keys), most // self.block_size, blocks + self._most_blocks)
        if end <= blocks or not any(self._may_have(self.piece_key(keys[blocks], group)) for group in self.every):
            return None
        wanted = tuple(tokens[blocks * self.block_size : end * self.block_size])
        seconds = START_SECONDS_PER_TOKEN if seconds_per_token is None else seconds_per_token
        return DiskLoad(self, blocks, tuple(keys[blocks:end]), wanted, matched, seconds)
