"""Where a text can be begun from, when that takes a recurrent state: at a snapshot within what is cached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from cortexmlx.kv.prefix import Entry, Match, common_length

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


def whole_blocks(match: Match) -> Iterator[Match]:
    """The parts of a match that end with a full block, the longest first, and the empty one."""
    for index in range(len(match.entries), -1, -1):
        yield _cut(match, index, None, 0, None)


def _cut(match: Match, blocks: int, partial: Entry | None, tokens: int, snapshot: int | None) -> Match:
    return replace(match, entries=match.entries[:blocks], partial=partial, partial_tokens=tokens, snapshot=snapshot)


def _places(entry: Entry, most: int) -> list[int]:
    """Where an entry has snapshots, the last first."""
    return sorted((place for place in entry.states if place <= most), reverse=True)


def _with_snapshots(match: Match) -> Iterator[Entry]:
    return islice((e for e in reversed(match.last.children.values()) if e.states), _CHILDREN_LOOKED_AT)
