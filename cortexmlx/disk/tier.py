"""The disk tier as the KV cache sees it: which blocks are to be stored, and which a prompt can load. It knows neither
files nor mlx.

What is stored are *pieces*: the block of an entry in one layer group, or the recurrent state at the end of an entry. A
piece's key is made of the entry's key, which stands for all text from the beginning, and of the model's identity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from cortexmlx.kv.prefix import GONE, Key, PrefixEntry
from cortexmlx.kv.spec import LayerGroup

STATE = -1
"""Used in place of a group's number: the recurrent state at the end of a block."""

START_SECONDS_PER_TOKEN = 1 / 2000
"""The estimate for computing a prompt token until one was measured."""

_READING_SECONDS = 0.001
"""Seconds that a load takes besides reading its bytes."""

MAX_READ = 4 << 30
"""Bytes that are read for one prompt at once. They wait in memory beside the arena. What comes after them is
computed.
"""

_MAX_LEAVING = 1 << 16
"""How many entries may wait to be stored."""


def model_identity(fingerprint: str, secret: bytes) -> bytes:
    """Return the identity of a model in the folder with this secret. `fingerprint`: what `disk.setup` makes."""
    return hashlib.blake2b(fingerprint.encode(), key=secret, digest_size=32).digest()


def piece_key(identity: bytes, entry: Key, group: int) -> Key:
    """Return the key under which an entry's piece of one group is stored, for the model with this identity."""
    return hashlib.blake2b(entry + b"%d" % group, key=identity, digest_size=16).digest()


class PieceContent(Protocol):
    """The arrays of one piece (of a block or of states, in all layers): what the disk stores under one key."""

    @property
    def arrays(self) -> tuple[np.ndarray, ...]: ...


@dataclass(frozen=True)
class PieceLoad:
    """A piece from disk to be written into `target`: a block of `group`, or a snapshot if `group` is `STATE`."""

    group: int
    target: int
    content: PieceContent


@dataclass(eq=False)
class DiskLoad:
    """A load of a prompt's blocks from disk, from the request to its result.

    `DiskTier.make_load` makes it. Its owner sets `pieces` when they are read. All other fields stay as they are, so
    another thread may call `requested_pieces`, `piece_groups` and `choose_pieces` meanwhile.
    """

    tier: DiskTier = field(repr=False)
    first_block: int
    """The index, in the text, of the first block that is requested."""
    keys: tuple[Key, ...]
    """The keys of the entries of the requested blocks."""
    tokens: tuple[int, ...] = field(repr=False)
    """The tokens of these blocks, in order."""
    matched_tokens: int
    """How many tokens of the text are in memory."""
    seconds_per_token: float
    """The time to compute a token."""
    pieces: Mapping[Key, PieceContent] | None = field(default=None, repr=False)
    """The pieces that were read, by key; None while they are being read."""

    def requested_pieces(self) -> dict[Key, tuple[int, ...]]:
        """Return the keys of all requested pieces, each with its tokens. Not all of them need exist."""
        size = self.tier.block_size
        contents = (self.tokens[i : i + size] for i in range(0, len(self.tokens), size))
        each = zip(self.keys, contents, strict=True)
        return {self.tier.piece_key(key, group): content for key, content in each for group in self.tier.all_groups}

    def piece_groups(self) -> dict[Key, int]:
        """Return the layer group of each requested piece, or `STATE`, by the piece's key, in the order of `keys`."""
        return {self.tier.piece_key(key, group): group for key in self.keys for group in self.tier.all_groups}

    def reusable_blocks(self, available: Collection[Key]) -> int:
        """Return how many blocks of the text need not be computed if the pieces `available` are read from disk."""
        last = self.first_block + len(self.keys)
        chain = next(
            (
                p
                for p in range(self.first_block, last)
                if not self._has_pieces(available, p, self.tier.full_attention_groups)
            ),
            last,
        )
        for end in range(chain, self.first_block, -1):
            if all(
                self._has_pieces(available, block, (group,))
                for block, group in self._needed_pieces(end)
                if block >= self.first_block
            ):
                return end
        return self.first_block

    def choose_pieces(self, piece_sizes: Mapping[Key, int], rate: float) -> list[Key]:
        """Return the keys of the pieces worth reading; none if they help nothing, or if computing is faster. They are
        what it takes to reuse as many blocks as possible. `piece_sizes` has the bytes of each piece that exists, and
        `rate` is how many bytes can be read per second.
        """
        end = self.reusable_blocks(piece_sizes)
        keys = [self._piece_key(block, group) for block, group in self._needed_pieces(end)]
        seconds = _READING_SECONDS + sum(piece_sizes[key] for key in keys if key in piece_sizes) / rate
        return keys if end > self.first_block and seconds < self._compute_time(end) else []

    @property
    def compute_seconds(self) -> float:
        """The seconds that computing all requested tokens would take, instead of reading them."""
        return self._compute_time(self.first_block + len(self.keys))

    @cached_property
    def blocks_after_load(self) -> int:
        """How many of the text's first blocks need not be computed: they are in memory, or their pieces were read."""
        assert self.pieces is not None
        return self.reusable_blocks(self.pieces)

    def piece(self, block: int, group: int) -> PieceContent:
        """Return a piece that was read, by its layer group and the index of its block."""
        assert self.pieces is not None
        return self.pieces[self._piece_key(block, group)]

    def can_continue(self, tokens: Sequence[int], keys: Sequence[Key], blocks: int, max_tokens: int) -> bool:
        """Return whether the pieces that were read continue a text after its first `blocks` blocks. They must have the
        `tokens` and `keys` of that text, and end within its first `max_tokens` tokens.
        """
        size = self.tier.block_size
        if (
            self.pieces is None
            or not self.first_block <= blocks < self.blocks_after_load <= min(len(keys), max_tokens // size)
            or keys[self.blocks_after_load - 1] != self.keys[self.blocks_after_load - 1 - self.first_block]
        ):
            return False
        start, count = self.first_block * size, (self.blocks_after_load - self.first_block) * size
        return tuple(tokens[start : start + count]) == self.tokens[:count]

    def is_reading_block(self, keys: Sequence[Key], block: int) -> bool:
        """Return whether the block at index `block` of a text with these `keys` is being read by this load."""
        is_requested = self.pieces is None and self.first_block <= block < min(
            len(keys), self.first_block + len(self.keys)
        )
        return is_requested and keys[block] == self.keys[block - self.first_block]

    def _needed_pieces(self, end: int) -> Iterator[tuple[int, int]]:
        """Yield block index and group of each piece that is needed to begin after the first `end` blocks, in order."""
        first_blocks = {group: self.tier.first_visible_block(group, end) for group in range(len(self.tier.groups))}
        for block in range(self.first_block, end):
            yield from ((block, group) for group, first_block in first_blocks.items() if block >= first_block)
        if self.tier.states:
            yield end - 1, STATE

    def _compute_time(self, end: int) -> float:
        """Return the seconds to compute the tokens up to the end of the first `end` blocks."""
        return (end * self.tier.block_size - self.matched_tokens) * self.seconds_per_token

    def _has_pieces(self, available: Collection[Key], block: int, groups: Sequence[int]) -> bool:
        """Return whether the pieces of a block in these groups are among the `available` ones."""
        return all(self._piece_key(block, group) in available for group in groups)

    def _piece_key(self, block: int, group: int) -> Key:
        return self.tier.piece_key(self.keys[block - self.first_block], group)


class DiskTier:
    """The disk tier of a `KVCache`: it collects cached entries to be stored, and makes the disk loads of prompts.

    With `states`, a text can begin only where its recurrent state is stored. `start` begins to read a load, which is
    answered later. `on_dropped` is called with the number of pieces that left memory before they were stored. If
    `may_have` returns False for all pieces of the first block that is missing, nothing is requested.

    `identity` names the model, in at most 64 bytes. No other model has the same. While it is None, no piece has a key:
    nothing is requested, and entries wait to be stored.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        block_size: int,
        states: bool,
        start: Callable[[DiskLoad], None],
        identity: bytes | None,
        on_dropped: Callable[[int], None] = lambda pieces: None,
        may_have: Callable[[Key], bool] = lambda piece: True,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.states = states
        self.start = start
        self.identity = identity
        self.all_groups = (*range(len(groups)), *((STATE,) if states else ()))
        self.full_attention_groups = [g for g, group in enumerate(groups) if group.spec.attention_window.tokens is None]
        self._most_blocks = MAX_READ // max(1, sum(group.bytes_per_token for group in groups) * block_size)
        self._on_dropped = on_dropped
        self._may_have = may_have
        self._queued_entries: dict[PrefixEntry, None] = {}

    def first_visible_block(self, group: int, block: int) -> int:
        """Return the index of the first block that the first token of the block at index `block` attends to."""
        return self.groups[group].spec.attention_window.first_visible_block(block * self.block_size, self.block_size)

    def piece_key(self, entry: Key, group: int) -> Key:
        """Return the key under which an entry's piece of one group is stored."""
        assert self.identity is not None
        return piece_key(self.identity, entry, group)

    # -- down ---------------------------------------------------------------------------------------------------------

    def on_cached(self, entry: PrefixEntry) -> None:
        """Queue an entry to be stored: it was just cached, or has got a block that it lacked."""
        if len(entry.tokens) == self.block_size and any(True for _ in self.unstored_pieces(entry)):
            self._queued_entries[entry] = None
            if len(self._queued_entries) > _MAX_LEAVING:
                self._count_dropped(self._pop_oldest())

    def remove_queued(self, entries: Iterable[PrefixEntry]) -> None:
        """Remove entries from the queue, since the sequence that cached them continues with another text."""
        for entry in entries:
            self._queued_entries.pop(entry, None)

    def pop_entries(self) -> Iterator[PrefixEntry]:
        """Take entries to store from the queue, oldest first, and yield them. Call `mark_stored` for what is stored."""
        while self._queued_entries:
            entry = self._pop_oldest()
            if entry.is_removed:
                self._count_dropped(entry)
            elif any(True for _ in self.unstored_pieces(entry)):
                yield entry

    def unstored_pieces(self, entry: PrefixEntry) -> Iterator[tuple[int, int]]:
        """Yield the pieces of an entry that are not stored: a group with its block, or `STATE` with its snapshot."""
        for group, block in enumerate(entry.blocks):
            if block != GONE and group not in entry.on_disk:
                yield group, block
        if self.block_size in entry.states and STATE not in entry.on_disk:
            yield STATE, entry.states[self.block_size]

    @staticmethod
    def mark_stored(entry: PrefixEntry, group: int) -> None:
        """Note that a piece of an entry was given to the writer. It stays so, too, if the writer drops it."""
        entry.on_disk = entry.on_disk | {group}

    def __len__(self) -> int:
        """Return how many entries wait to be stored."""
        return len(self._queued_entries)

    def _pop_oldest(self) -> PrefixEntry:
        entry = next(iter(self._queued_entries))
        del self._queued_entries[entry]
        return entry

    def _count_dropped(self, entry: PrefixEntry) -> None:
        """Report the unstored pieces of an entry as dropped."""
        self._on_dropped(sum(1 for _ in self.unstored_pieces(entry)))

    # -- up -----------------------------------------------------------------------------------------------------------

    def make_load(
        self,
        tokens: Sequence[int],
        keys: Sequence[Key],
        blocks: int,
        matched_tokens: int,
        max_tokens: int,
        seconds_per_token: float | None,
    ) -> DiskLoad | None:
        """Plan to read what follows a text's first `blocks` blocks (`matched_tokens` tokens), which are in memory.
        Return None if the disk certainly has no further full block.

        Tokens after the first `max_tokens` tokens are computed in any case, and so are those after `MAX_READ` bytes.
        """
        if self.identity is None:
            return None
        end = min(len(keys), max_tokens // self.block_size, blocks + self._most_blocks)
        if end <= blocks or not any(self._may_have(self.piece_key(keys[blocks], group)) for group in self.all_groups):
            return None
        wanted_tokens = tuple(tokens[blocks * self.block_size : end * self.block_size])
        seconds = START_SECONDS_PER_TOKEN if seconds_per_token is None else seconds_per_token
        return DiskLoad(self, blocks, tuple(keys[blocks:end]), wanted_tokens, matched_tokens, seconds)
