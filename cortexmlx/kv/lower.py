"""The tier below the arena: which blocks go there, and which a prompt can have back. Knows neither files nor mlx.

What lies there are *pieces*: the block of an entry in one layer group, or the recurrent state behind an entry. A
piece's key is made of the entry's, so it stands for all text from the very beginning, too, and of the model's identity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, eq=False)
class LoadRequest:
    """What a prompt would have from below: the blocks of its text from place `begin` on. `keys` are those of their
    entries, `tokens` what they hold, one after the other, and `matched` tokens of the text are in memory. A token costs
    `seconds_per_token` to compute.
    """

    tier: LowerTier = field(repr=False)
    begin: int
    keys: tuple[Key, ...]
    tokens: tuple[int, ...] = field(repr=False)
    matched: int
    seconds_per_token: float

    def pieces(self) -> dict[Key, tuple[int, ...]]:
        """All pieces that there may be, by key, each with its tokens."""
        size = self.tier.block_size
        contents = (self.tokens[i : i + size] for i in range(0, len(self.tokens), size))
        each = zip(self.keys, contents, strict=True)
        return {self.tier.piece_key(key, group): content for key, content in each for group in self.tier.every}

    def end(self, there: Collection[Key]) -> int:
        """The place up to which a text can begin with what is `there`, and with what is in memory."""
        chain = next((p for p in range(self.begin, self._last) if not self._has(there, p, self.tier.whole)), self._last)
        for end in range(chain, self.begin, -1):
            if all(self._has(there, place, (group,)) for place, group in self.needed(end) if place >= self.begin):
                return end
        return self.begin

    def needed(self, end: int) -> Iterator[tuple[int, int]]:
        """Places and groups of the pieces that it takes to begin at a place, in order."""
        fronts = {group: self.tier.front(group, end) for group in range(len(self.tier.groups))}
        for place in range(self.begin, end):
            yield from ((place, group) for group, front in fronts.items() if place >= front)
        if self.tier.states:
            yield end - 1, STATE

    def choose(self, there: Mapping[Key, int], rate: float) -> list[Key]:
        """The pieces worth reading of those that are `there`, by their bytes, where `rate` bytes are read in a second:
        those that it takes to begin as far as can be, or none if computing them is faster.
        """
        end = self.end(there)
        keys = [self.tier.piece_key(self.keys[place - self.begin], group) for place, group in self.needed(end)]
        seconds = _READING_SECONDS + sum(there[key] for key in keys if key in there) / rate
        computed = (end * self.tier.block_size - self.matched) * self.seconds_per_token
        return keys if end > self.begin and seconds < computed else []

    @property
    def seconds(self) -> float:
        """What it takes to compute what is wished."""
        return (self._last * self.tier.block_size - self.matched) * self.seconds_per_token

    def _has(self, there: Collection[Key], place: int, groups: Sequence[int]) -> bool:
        return all(self.tier.piece_key(self.keys[place - self.begin], group) in there for group in groups)

    @property
    def _last(self) -> int:
        return self.begin + len(self.keys)


@dataclass(frozen=True, eq=False)
class LoadResult:
    """What was read for a load request: a text can begin with it up to place `end`."""

    load_request: LoadRequest
    end: int
    pieces: Mapping[Key, Content] = field(repr=False)

    def piece(self, place: int, group: int) -> Content:
        """One that it takes."""
        return self.pieces[
            self.load_request.tier.piece_key(self.load_request.keys[place - self.load_request.begin], group)
        ]

    def continues(self, tokens: Sequence[int], keys: Sequence[Key], blocks: int, most: int) -> bool:
        """Whether it goes on where the first `blocks` blocks of a text, known by `keys`, end, and ends within the first
        `most` tokens.
        """
        load_request, size = self.load_request, self.load_request.tier.block_size
        if (
            not load_request.begin <= blocks < self.end <= min(len(keys), most // size)
            or keys[self.end - 1] != load_request.keys[self.end - 1 - load_request.begin]
        ):
            return False
        begin, count = load_request.begin * size, (self.end - load_request.begin) * size
        return tuple(tokens[begin : begin + count]) == load_request.tokens[:count]


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
        ask: Callable[[LoadRequest], None],
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

    def load_request(
        self,
        tokens: Sequence[int],
        keys: Sequence[Key],
        blocks: int,
        matched: int,
        most: int,
        seconds_per_token: float | None,
    ) -> LoadRequest | None:
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
        return LoadRequest(self, blocks, tuple(keys[blocks:end]), wanted, matched, seconds)
