"""Where a cached text can be continued: before any missing block, and for recurrent layers at a snapshot. And which of
these places are given up first, when there is no room for all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Generic, TypeVar

from cortexmlx.kv.prefix import Entry, Match, common_length

Point = TypeVar("Point", bound=Hashable)

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


_SHORT = 8
"""A point goes late if the text before it, back to the next point, is at least this part of the text after it."""


class PointOrder(Generic[Point]):
    """In which order resume points are given up: first those that their text has *superseded* by later ones, then the
    others, then pinned ones. The least recently used goes first.

    So a long loop of calls gives up its own older rounds before it takes the place of another conversation.
    """

    def __init__(self) -> None:
        self._superseded: OrderedDict[Point, None] = OrderedDict()
        self._current: OrderedDict[Point, None] = OrderedDict()
        self._pinned: set[Point] = set()

    def __len__(self) -> int:
        return len(self._superseded) + len(self._current)

    def __iter__(self) -> Iterator[Point]:
        """Yield the points in the order in which they go."""
        each = (*self._superseded, *self._current)
        yield from (point for point in each if point not in self._pinned)
        yield from (point for point in each if point in self._pinned)

    @property
    def some_superseded(self) -> bool:
        """Whether a superseded point goes next."""
        return any(point not in self._pinned for point in self._superseded)

    def add(self, point: Point, spare: bool) -> None:
        """Add a point as the most recently used one; one that is `spare` begins as superseded."""
        (self.supersede if spare else self.use)(point)

    def use(self, point: Point) -> None:
        """Add a point, or mark it as the most recently used one."""
        self._superseded.pop(point, None)
        self._current[point] = None
        self._current.move_to_end(point)

    def supersede(self, point: Point) -> None:
        """Add a superseded point, or mark it as the one that was superseded last."""
        self._current.pop(point, None)
        self._superseded[point] = None
        self._superseded.move_to_end(point)

    def discard(self, point: Point) -> None:
        """Remove a point, if it is there."""
        self._current.pop(point, None)
        self._superseded.pop(point, None)
        self._pinned.discard(point)

    def pin(self, point: Point) -> None:
        """Give a point up after all others."""
        self._pinned.add(point)

    def unpin(self, point: Point) -> None:
        """Undo `pin`."""
        self._pinned.discard(point)

    def continue_text(self, points: Sequence[tuple[int, Point]], kept: Container[int], shared: Point | None) -> None:
        """Supersede the points of a text that now continues from the last of them. `points` are all of them in order,
        each with its place.

        The last point stays, and those at the places `kept`, and `shared`, where other texts part from this one. Of the
        others, those go last that leave the least to compute again: each is twice as far from the end as the one after
        it, or has a long text before it.
        """
        end, spacing = points[-1][0] if points else 0, 0
        for index in range(len(points) - 1, -1, -1):
            place, point = points[index]
            before, distance = points[index - 1][0] if index else 0, end - place
            if not distance or place in kept or point == shared:
                self.use(point)
            elif distance >= 2 * spacing or _SHORT * (place - before) >= distance:
                self.supersede(point)
                spacing = distance
            elif point in self._current:
                self.supersede(point)
                self._superseded.move_to_end(point, last=False)


def parting(match: Match, block_size: int) -> Entry | None:
    """Return the first block of a match after which cached texts part; None if there is no such block."""
    for entry in match.entries:
        if len(entry.children) > 1 and sum(len(e.tokens) == block_size for e in entry.children.values()) > 1:
            return entry
    return None
