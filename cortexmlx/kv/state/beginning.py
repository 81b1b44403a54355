"""Where a text can be begun from, when that takes a recurrent state: at the latest snapshot within what is cached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from cortexmlx.kv.prefix import Entry, Match, common_length

_CHILDREN_LOOKED_AT = 16
"""How many successors of a block that have snapshots are compared, the newest first."""


def at_snapshot(match: Match, rest: Sequence[int], block_size: int) -> Match:
    """The part of a match that ends at its latest snapshot. `rest` are the tokens behind its full blocks, as many as
    may be cached and no more than a block's.
    """
    found = [(_latest(entry, common_length(entry.tokens, rest)), entry) for entry in _with_snapshots(match)]
    place, partial = max(found, key=lambda each: each[0], default=(0, None))
    if partial is not None and place:
        return replace(match, partial=partial, partial_tokens=place, snapshot=partial.states[place])
    for index in range(len(match.entries) - 1, -1, -1):
        entry = match.entries[index]
        place = _latest(entry, block_size)
        if place == block_size:
            return _cut(match, index + 1, None, 0, entry.states[place])
        if place:
            return _cut(match, index, entry, place, entry.states[place])
    return _cut(match, 0, None, 0, None)


def at_block_end(match: Match, block_size: int) -> Match:
    """The part of a match that ends at its latest snapshot at a block's end."""
    for index in range(len(match.entries) - 1, -1, -1):
        snapshot = match.entries[index].states.get(block_size)
        if snapshot is not None:
            return _cut(match, index + 1, None, 0, snapshot)
    return _cut(match, 0, None, 0, None)


def _cut(match: Match, blocks: int, partial: Entry | None, tokens: int, snapshot: int | None) -> Match:
    return replace(match, entries=match.entries[:blocks], partial=partial, partial_tokens=tokens, snapshot=snapshot)


def _latest(entry: Entry, most: int) -> int:
    return max((place for place in entry.states if place <= most), default=0)


def _with_snapshots(match: Match) -> Iterator[Entry]:
    return islice((e for e in reversed(match.last.children.values()) if e.states), _CHILDREN_LOOKED_AT)
