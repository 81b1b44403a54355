"""Where a cached text can be resumed: before any gap, and for recurrent layers at a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from cortexmlx.kv.prefix import Entry, Match, common_length

Lacks = Callable[[Match, int], int | None]
"""The place of a block that is gone, but seen by the token behind a match's first so many ones; None if none is."""

_CHILDREN_LOOKED_AT = 16
"""How many successors of a block that have snapshots are compared, the newest first."""


def at_snapshots(match: Match, rest: Sequence[int], block_size: int) -> Iterator[Match]:
    """The parts of a match that end at a snapshot, the longest first, and the empty one. `rest` are the tokens behind
    its full blocks, as many as may be cached and no more than a block's.
    """
    found = [(place, e) for e in _with_snapshots(match) for place in _places(e, common_length(e.tokens, rest))]
    for place, partial in sorted(found, key=lambda each: each[0], reverse=True):
        yield replace(match, partial=partial, partial_tokens=place, snapshot=partial.states[place])
    for index in range(len(match.entries) - 1, -1, -1):
        entry = match.entries[index]
        for place in _places(entry, block_size):
            if place == block_size:
                yield _cut(match, index + 1, None, 0, entry.states[place])
            else:
                yield _cut(match, index, entry, place, entry.states[place])
    yield _cut(match, 0, None, 0, None)


def at_block_ends(match: Match, block_size: int) -> Iterator[Match]:
    """The parts of a match that end at a snapshot at a block's end, the longest first, and the empty one."""
    for index in range(len(match.entries) - 1, -1, -1):
        snapshot = match.entries[index].states.get(block_size)
        if snapshot is not None:
            yield _cut(match, index + 1, None, 0, snapshot)
    yield _cut(match, 0, None, 0, None)


def whole_blocks(match: Match) -> Match:
    """A match without its partial block."""
    return _cut(match, len(match.entries), None, 0, None)


def without_gaps(match: Match, lacks: Lacks, block_size: int) -> Match:
    """The longest part of a match that lacks nothing where a text needs no state: all of it, or some of its full
    blocks.

    All that end behind a block that is gone see it, too, so the next that may be a beginning ends before it. Nothing is
    made on the way, so that a long match without a window's blocks costs no more than it took to find.
    """
    tokens = end = match.tokens(block_size)
    while (gone := lacks(match, end)) is not None:
        end = gone * block_size
    return match if end == tokens else _cut(match, end // block_size, None, 0, None)


def _cut(match: Match, blocks: int, partial: Entry | None, tokens: int, snapshot: int | None) -> Match:
    return replace(match, entries=match.entries[:blocks], partial=partial, partial_tokens=tokens, snapshot=snapshot)


def _places(entry: Entry, most: int) -> list[int]:
    """Where an entry has snapshots, the last first."""
    return sorted((place for place in entry.states if place <= most), reverse=True)


def _with_snapshots(match: Match) -> Iterator[Entry]:
    return islice((e for e in reversed(match.last.children.values()) if e.states), _CHILDREN_LOOKED_AT)
