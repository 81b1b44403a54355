"""Where a cached text can be continued: before any missing block, and for recurrent layers at a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from cortexmlx.kv.prefix import Entry, Match, common_length

FindMissing = Callable[[Match, int], int | None]
"""Given a match and a number of tokens: return the index of a missing block that the token after these tokens sees;
None if no such block is missing.
"""

_CHILDREN_LOOKED_AT = 16
"""How many successors of a block that have snapshots are compared, the newest first."""


def at_snapshots(match: Match, rest: Sequence[int], block_size: int) -> Iterator[Match]:
    """Yield the parts of a match that end at a snapshot, the longest first, and at last the empty part. `rest` has the
    tokens after the full blocks of the match: at most a block, and at most as many as may come from the cache.
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
    """Yield the parts of a match that end at a snapshot at the end of a block, the longest first, and at last the empty
    part.
    """
    for index in range(len(match.entries) - 1, -1, -1):
        snapshot = match.entries[index].states.get(block_size)
        if snapshot is not None:
            yield _cut(match, index + 1, None, 0, snapshot)
    yield _cut(match, 0, None, 0, None)


def whole_blocks(match: Match) -> Match:
    """Return a match without its partial block."""
    return _cut(match, len(match.entries), None, 0, None)


def without_missing_blocks(match: Match, find_missing: FindMissing, block_size: int) -> Match:
    """Return the longest part of a match at whose end no block is missing, for models without states. That is all of
    it, or some of its full blocks.

    All parts that end after a missing block, and see it, are skipped at once: the next candidate ends before that
    block. Only the result is made, so a long match that lacks its windows' blocks costs no more than it took to find.
    """
    tokens = end = match.tokens(block_size)
    while (gone := find_missing(match, end)) is not None:
        end = gone * block_size
    return match if end == tokens else _cut(match, end // block_size, None, 0, None)


def _cut(match: Match, blocks: int, partial: Entry | None, tokens: int, snapshot: int | None) -> Match:
    return replace(match, entries=match.entries[:blocks], partial=partial, partial_tokens=tokens, snapshot=snapshot)


def _places(entry: Entry, most: int) -> list[int]:
    """Return the places of an entry's snapshots up to `most`, the last first."""
    return sorted((place for place in entry.states if place <= most), reverse=True)


def _with_snapshots(match: Match) -> Iterator[Entry]:
    return islice((e for e in reversed(match.last.children.values()) if e.states), _CHILDREN_LOOKED_AT)
