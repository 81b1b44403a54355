"""Snapshots of recurrent states: which exist, where a text can continue from one, and which is dropped next. Without
mlx.

The keys and values of a text's beginning are part of those of the text. A recurrent state is not: it exists only at the
tokens after which it was kept. A snapshot belongs to its *home*. That is the sequence that computed it, and later the
cached entry of the block of its last token. It is dropped with that block. All snapshots have the same size. When their
number is at the limit, the first in the `ResumePointOrder` is dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Generic, TypeVar

from cortexmlx.kv.prefix import PrefixEntry, PrefixMatch, common_prefix_length, predecessor
from cortexmlx.kv.table import SequenceBlocks

Row = tuple[int, int]
"""Names a row's state: its job, and the job's generation when it got the row."""


@dataclass(frozen=True)
class RowSnapshot:
    """The snapshot that holds, or will hold, a row's recurrent state after its first `tokens` tokens."""

    row: Row
    tokens: int
    snapshot: int


@dataclass(frozen=True)
class StateOps:
    """A step's work on recurrent states, in order: `saves`, `begins`, `drops`, `ends`, and `step_snapshots`, which are
    made during the step.
    """

    saves: tuple[RowSnapshot, ...] = ()
    """Snapshots of states that the last steps computed."""
    begins: tuple[RowSnapshot, ...] = ()
    """Rows that begin with the state of a snapshot."""
    drops: tuple[int, ...] = ()
    """Snapshots that are no longer needed."""
    ends: tuple[Row, ...] = ()
    """Rows whose states are no longer needed."""
    step_snapshots: tuple[RowSnapshot, ...] = ()
    """Snapshots of states that this step computes within its pieces."""


NO_STATE_OPS = StateOps()

Home = dict[int, int]
"""Snapshots by the number of tokens, of the sequence or of the block, that they come after."""


class SnapshotRegistry:
    """Knows all snapshots of recurrent states, at most `max_snapshots`, and collects the next step's work on states."""

    def __init__(self, max_snapshots: int) -> None:
        self.max_snapshots = max_snapshots
        self.order: ResumePointOrder[int] = ResumePointOrder()
        self._homes: dict[int, tuple[Home, int]] = {}
        self._count = 0
        self._saves: list[RowSnapshot] = []
        self._begins: list[RowSnapshot] = []
        self._drops: list[int] = []
        self._ends: list[Row] = []

    def __len__(self) -> int:
        return len(self._homes)

    def numbers(self) -> set[int]:
        """Return the numbers of all snapshots."""
        return set(self._homes)

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def make(self, home: Home, position: int, spare: bool = False) -> int | None:
        """Register a new snapshot in `home`, a sequence's or block's snapshots, after `position` of its tokens. Return
        its number. The caller must have the state saved. None if there is one already, or if no snapshots are allowed.

        A `spare` one begins as superseded, and replaces only superseded ones.
        """
        if position in home:
            if not spare:
                self.order.mark_used(home[position])
            return None
        if not self.max_snapshots or (
            spare and len(self._homes) >= self.max_snapshots and not self.order.is_superseded_next
        ):
            return None
        while len(self._homes) >= self.max_snapshots:
            self._drop(next(iter(self.order)))
        self._count += 1
        home[position] = self._count
        self._homes[self._count] = (home, position)
        self.order.add(self._count, spare)
        return self._count

    def move(self, home: Home, position: int, target: Home, target_position: int) -> None:
        """Move a snapshot to the home `target`, at `target_position`. Drop it if that place has a snapshot already."""
        snapshot = home[position]
        if target_position in target:
            self._drop(snapshot)
            return
        del home[position]
        target[target_position] = snapshot
        self._homes[snapshot] = (target, target_position)

    def drop_all(self, home: Home) -> None:
        """Drop all snapshots of a home: of a sequence, or of a cached block."""
        for snapshot in list(home.values()):
            self._drop(snapshot)

    def _drop(self, snapshot: int) -> None:
        home, position = self._homes.pop(snapshot)
        self.order.discard(snapshot)
        del home[position]
        self._drops.append(snapshot)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def save_row(self, row: Row, tokens: int, snapshot: int) -> None:
        """Have the next step save a row's state after `tokens` tokens, computed by its last step, as a new snapshot."""
        self._saves.append(RowSnapshot(row, tokens, snapshot))

    def begin_row(self, row: Row, tokens: int, snapshot: int) -> None:
        """Have a row begin with a snapshot's state: the one after `tokens` tokens. The snapshot may have been
        dropped while the row got its blocks; it exists until the next step.
        """
        if snapshot in self._homes:
            self.order.mark_used(snapshot)
        self._begins.append(RowSnapshot(row, tokens, snapshot))

    def end_row(self, row: Row) -> None:
        """Have the next step drop a row's state."""
        self._ends.append(row)

    def take_ops(self, step_snapshots: tuple[RowSnapshot, ...] = ()) -> StateOps:
        """Return, and clear, all state operations since the last call. `step_snapshots` are of the step that will carry
        them out.

        A dropped snapshot is not saved, unless a row begins with it.
        """
        begun_snapshots = {row_snapshot.snapshot for row_snapshot in self._begins}
        saves = tuple(s for s in self._saves if s.snapshot in self._homes or s.snapshot in begun_snapshots)
        step_snapshots = tuple(s for s in step_snapshots if s.snapshot in self._homes)
        ops = StateOps(saves, tuple(self._begins), tuple(self._drops), tuple(self._ends), step_snapshots)
        for op_list in (self._saves, self._begins, self._drops, self._ends):
            op_list.clear()
        return ops

    def check_invariants(self, homes: Sequence[Home]) -> None:
        """Raise AssertionError unless `homes` have exactly the known snapshots, each at its place."""
        actual_homes = {snapshot: (id(home), position) for home in homes for position, snapshot in home.items()}
        known_homes = {snapshot: (id(home), place) for snapshot, (home, place) in self._homes.items()}
        assert actual_homes == known_homes, "a snapshot hangs elsewhere than is known"
        assert sum(map(len, homes)) == len(known_homes) <= self.max_snapshots, (
            "a snapshot hangs twice, or there are too many"
        )
        assert set(self.order) == known_homes.keys(), "a snapshot is in no order, or one that is gone"


# Where a cached text can be continued: before any missing block, and for recurrent layers at a snapshot. And which of
# these places are given up first, when there is no room for all.


ResumePoint = TypeVar("ResumePoint", bound=Hashable)

FindMissing = Callable[[PrefixMatch, int], int | None]
"""Given a match and a number of tokens: return the index of a missing block that the token after these tokens sees;
None if no such block is missing.
"""

_MAX_COMPARED_CHILDREN = 16
"""How many successors of a block that have snapshots are compared, the newest first."""


def cut_at_snapshots(match: PrefixMatch, rest: Sequence[int], block_size: int) -> Iterator[PrefixMatch]:
    """Yield the prefixes of a match that end at a snapshot, the longest first, and at last the empty prefix. `rest` are
    the prompt's tokens after the full blocks of the match, at most a block, for which a partial block is looked up.
    """
    candidates = [
        (position, e)
        for e in _children_with_snapshots(match)
        for position in _snapshot_places(e, common_prefix_length(e.tokens, rest))
    ]
    for place, partial in sorted(candidates, key=lambda each: each[0], reverse=True):
        yield replace(match, partial=partial, partial_tokens=place, snapshot=partial.states[place])
    for index in range(len(match.entries) - 1, -1, -1):
        entry = match.entries[index]
        for place in _snapshot_places(entry, block_size):
            if place == block_size:
                yield _cut_match(match, index + 1, None, 0, entry.states[place])
            else:
                yield _cut_match(match, index, entry, place, entry.states[place])
    yield _cut_match(match, 0, None, 0, None)


def cut_at_block_snapshots(match: PrefixMatch, block_size: int) -> Iterator[PrefixMatch]:
    """Yield the prefixes of a match that end at a snapshot at a block's end, the longest first, the empty one last."""
    for index in range(len(match.entries) - 1, -1, -1):
        snapshot = match.entries[index].states.get(block_size)
        if snapshot is not None:
            yield _cut_match(match, index + 1, None, 0, snapshot)
    yield _cut_match(match, 0, None, 0, None)


def drop_partial_block(match: PrefixMatch) -> PrefixMatch:
    """Return a match without its partial block."""
    return _cut_match(match, len(match.entries), None, 0, None)


def cut_before_missing_blocks(match: PrefixMatch, find_missing: FindMissing, block_size: int) -> PrefixMatch:
    """Return the longest prefix of a match after which no block that the next token sees is missing, for models without
    recurrent states. That is all of the match, or some of its full blocks.

    All parts that end after a missing block, and see it, are skipped at once: the next candidate ends before that
    block. Only the result is made, so a long match that lacks its windows' blocks costs no more than it took to find.
    """
    tokens = end = match.matched_tokens(block_size)
    while (missing_index := find_missing(match, end)) is not None:
        end = missing_index * block_size
    return match if end == tokens else _cut_match(match, end // block_size, None, 0, None)


def _cut_match(
    match: PrefixMatch, blocks: int, partial: PrefixEntry | None, tokens: int, snapshot: int | None
) -> PrefixMatch:
    """Return a match cut to `blocks` full blocks and a partial one."""
    return replace(match, entries=match.entries[:blocks], partial=partial, partial_tokens=tokens, snapshot=snapshot)


def _snapshot_places(entry: PrefixEntry, max_position: int) -> list[int]:
    """Return an entry's snapshot positions up to `max_position`, in tokens of its block, the last first."""
    return sorted((position for position in entry.states if position <= max_position), reverse=True)


def _children_with_snapshots(match: PrefixMatch) -> Iterator[PrefixEntry]:
    """Yield the newest of the entries that follow a match and have snapshots."""
    return islice((e for e in reversed(match.last_node.children.values()) if e.states), _MAX_COMPARED_CHILDREN)


_LATE_POINT_RATIO = 8
"""A point goes late if the text before it, back to the next point, is at least this part of the text after it."""


class ResumePointOrder(Generic[ResumePoint]):
    """The order in which resume points are discarded: first those *superseded* by later ones of their text, then the
    others, then pinned ones. Among these, the least recently used goes first.

    So a long loop of calls gives up its own older rounds before it takes the place of another conversation.
    """

    def __init__(self) -> None:
        self._superseded: OrderedDict[ResumePoint, None] = OrderedDict()
        self._current: OrderedDict[ResumePoint, None] = OrderedDict()
        self._pinned: set[ResumePoint] = set()

    def __len__(self) -> int:
        return len(self._superseded) + len(self._current)

    def __iter__(self) -> Iterator[ResumePoint]:
        """Yield the points in the order in which they are discarded."""
        each = (*self._superseded, *self._current)
        yield from (point for point in each if point not in self._pinned)
        yield from (point for point in each if point in self._pinned)

    @property
    def is_superseded_next(self) -> bool:
        """Whether the next point to be discarded is a superseded one."""
        return any(point not in self._pinned for point in self._superseded)

    def add(self, point: ResumePoint, spare: bool) -> None:
        """Add a point as the most recently used one, or as a superseded one if it is `spare`."""
        (self.supersede if spare else self.mark_used)(point)

    def mark_used(self, point: ResumePoint) -> None:
        """Add a point, or mark it as the most recently used one."""
        self._superseded.pop(point, None)
        self._current[point] = None
        self._current.move_to_end(point)

    def supersede(self, point: ResumePoint) -> None:
        """Add a superseded point, or mark it as the one that was superseded last."""
        self._current.pop(point, None)
        self._superseded[point] = None
        self._superseded.move_to_end(point)

    def discard(self, point: ResumePoint) -> None:
        """Remove a point, if it is there."""
        self._current.pop(point, None)
        self._superseded.pop(point, None)
        self._pinned.discard(point)

    def pin(self, point: ResumePoint) -> None:
        """Pin a point, so that it is discarded after all others."""
        self._pinned.add(point)

    def unpin(self, point: ResumePoint) -> None:
        """Undo `pin` of a point."""
        self._pinned.discard(point)

    def supersede_older(
        self,
        points: Sequence[tuple[int, ResumePoint]],
        kept_positions: Container[int],
        branching_point: ResumePoint | None,
    ) -> None:
        """Mark the older of `points` as superseded, because their text continues from the last of them. They are all
        points of the text in order, each with its position.

        The last point stays, and those at the places `kept_positions`, and `branching_point`, where other texts part
        from this one. Of the others, those go last that leave the least to compute again: each is twice as far from the
        end as the one after it, or has a long text before it.
        """
        end, spacing = points[-1][0] if points else 0, 0
        for index in range(len(points) - 1, -1, -1):
            position, point = points[index]
            previous_position, distance = points[index - 1][0] if index else 0, end - position
            if not distance or position in kept_positions or point == branching_point:
                self.mark_used(point)
            elif distance >= 2 * spacing or _LATE_POINT_RATIO * (position - previous_position) >= distance:
                self.supersede(point)
                spacing = distance
            elif point in self._current:
                self.supersede(point)
                self._superseded.move_to_end(point, last=False)


def first_branching_entry(match: PrefixMatch, block_size: int) -> PrefixEntry | None:
    """Return a match's first block after which several cached texts continue differently; None if there is none."""
    for entry in match.entries:
        if len(entry.children) > 1 and sum(len(e.tokens) == block_size for e in entry.children.values()) > 1:
            return entry
    return None


# The snapshots of recurrent states that sequences and cached blocks own.


class SequenceStates:
    """The recurrent states of a `KVCache`: which snapshots its sequences own, and where a match can be resumed.
    `sequences` are the cache's.

    Without `snapshots` the model has no recurrent states. Then a text can begin wherever its keys and values are
    cached, and these methods do nothing.
    """

    def __init__(
        self, block_size: int, snapshots: SnapshotRegistry | None, sequences: Mapping[int, SequenceBlocks]
    ) -> None:
        self.snapshots = snapshots
        self._sequences = sequences
        self._block_size = block_size

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent states."""
        return self.snapshots is not None

    def take_ops(self, step_snapshots: tuple[RowSnapshot, ...] = ()) -> StateOps:
        """Return, and clear, what the next step must do with states."""
        return NO_STATE_OPS if self.snapshots is None else self.snapshots.take_ops(step_snapshots)

    def longest_resumable(
        self, match: PrefixMatch, tokens: Sequence[int], max_tokens: int, find_missing: FindMissing
    ) -> PrefixMatch:
        """Return the longest prefix of a match of `tokens` after which a sequence can begin: no block that it sees is
        missing, and a recurrent state exists if the model has such states.
        """
        if self.snapshots is None:
            return cut_before_missing_blocks(match, find_missing, self._block_size)
        rest = tokens[match.chain : min(match.chain + self._block_size, max_tokens)]
        return self._first_complete(cut_at_snapshots(match, rest, self._block_size), find_missing)

    def longest_resumable_blocks(self, match: PrefixMatch, find_missing: FindMissing) -> PrefixMatch:
        """Return the longest prefix of a match, without a partial block, after which a sequence can begin."""
        if self.snapshots is None:
            return cut_before_missing_blocks(drop_partial_block(match), find_missing, self._block_size)
        return self._first_complete(cut_at_block_snapshots(match, self._block_size), find_missing)

    def _first_complete(self, parts: Iterator[PrefixMatch], find_missing: FindMissing) -> PrefixMatch:
        """Return the first of `parts` that a token can continue, because no block that it sees is missing."""
        return next(part for part in parts if find_missing(part, part.matched_tokens(self._block_size)) is None)

    def begin(self, sequence: SequenceBlocks, match: PrefixMatch | None, taken_entry: PrefixEntry | None) -> None:
        """Begin a sequence, with a match if there is one. `taken_entry` is the removed entry whose block the sequence
        has taken over. Snapshots within the matched tokens move to the sequence.
        """
        if self.snapshots is None or match is None:
            return
        sequence.snapshot = match.snapshot
        if taken_entry is not None:
            block_start = sequence.length - match.partial_tokens
            for position in [place for place in taken_entry.states if place <= match.partial_tokens]:
                self.snapshots.move(taken_entry.states, position, sequence.states, block_start + position)
            self.snapshots.drop_all(taken_entry.states)

    def fork(self, source: SequenceBlocks, sequence: SequenceBlocks) -> None:
        """Give a fork the state of `source` at the fork's length."""
        if self.snapshots is not None and sequence.length:
            sequence.snapshot = self._snapshot_at(source, sequence.length)

    def can_fork(self, seq: int, tokens: int) -> bool:
        """Return whether a fork after a sequence's first `tokens` tokens has the state that it needs."""
        return self.snapshots is None or not tokens or self._snapshot_at(self._sequences[seq], tokens) is not None

    def move_to_entry(self, sequence: SequenceBlocks, entry: PrefixEntry | None, index: int) -> None:
        """Move the snapshots of a sequence's block at `index` to the block's entry, because the block is cached now."""
        block_start = index * self._block_size
        if self.snapshots is None or entry is None:
            return
        for position in [p for p in sequence.states if block_start < p <= block_start + len(entry.tokens)]:
            self.snapshots.move(sequence.states, position, entry.states, position - block_start)

    def drop(self, states: dict[int, int]) -> None:
        """Drop the snapshots of a sequence or an entry that is removed."""
        if self.snapshots is not None:
            self.snapshots.drop_all(states)

    def make_snapshot(self, seq: int, tokens: int, spare: bool = False) -> int | None:
        """Return a new snapshot after a sequence's first `tokens` tokens; the caller must have the state saved. None
        if no snapshot is to be made. `spare` is that of `SnapshotRegistry.make`.
        """
        assert self.snapshots is not None
        home, position = self._find_home(self._sequences[seq], tokens)
        return None if home is None else self.snapshots.make(home, position, spare)

    def mark_used(self, seq: int, tokens: int) -> None:
        """Mark the snapshot after a sequence's first `tokens` tokens as the most recently used, if there is one."""
        snapshot = None if self.snapshots is None else self._snapshot_at(self._sequences[seq], tokens)
        if self.snapshots is not None and snapshot is not None:
            self.snapshots.order.mark_used(snapshot)

    def supersede_older(
        self, match: PrefixMatch, kept_positions: Container[int], branching_entry: PrefixEntry | None
    ) -> None:
        """Reorder the snapshots of a text that continues after a match, so that its older ones are dropped first."""
        if self.snapshots is None:
            return
        size, points = self._block_size, []
        for index, entry in enumerate(match.entries):
            points += [(index * size + position, entry.states[position]) for position in sorted(entry.states)]
        if match.partial is not None:
            states = match.partial.states
            block_start = len(match.entries) * size
            points += [
                (block_start + place, states[place]) for place in sorted(states) if place <= match.partial_tokens
            ]
        self.snapshots.order.supersede_older(
            points, kept_positions, None if branching_entry is None else branching_entry.states.get(size)
        )

    def begin_row(self, row: Row, seq: int) -> None:
        """Give a sequence's row the state of the snapshot that the sequence begins with."""
        sequence = self._sequences[seq]
        if self.snapshots is not None and sequence.snapshot is not None:
            self.snapshots.begin_row(row, sequence.length, sequence.snapshot)

    def end_row(self, row: Row, seq: int, kept_tokens: int) -> None:
        """End a sequence's row. Save its state after `kept_tokens` tokens as a snapshot, unless `kept_tokens` is 0."""
        if self.snapshots is None:
            return
        snapshot = self.make_snapshot(seq, kept_tokens) if kept_tokens else None
        if snapshot is not None:
            self.snapshots.save_row(row, kept_tokens, snapshot)
        self.snapshots.end_row(row)

    def _snapshot_at(self, sequence: SequenceBlocks, tokens: int) -> int | None:
        """Return the snapshot after a sequence's first `tokens` tokens; None if there is none."""
        home, position = self._find_home(sequence, tokens)
        return None if home is None else home.get(position)

    def _find_home(self, sequence: SequenceBlocks, tokens: int) -> tuple[dict[int, int] | None, int]:
        """Return the home of a snapshot after a sequence's first `tokens` tokens (the `states` of the sequence or of a
        cached entry), and its position in that home.

        The home is None if the block belongs to another entry with the same tokens, and has been evicted.
        """
        index = (tokens - 1) // self._block_size
        if index >= sequence.registered:
            return sequence.states, tokens
        entry = predecessor(sequence.parent, sequence.registered - 1 - index)
        assert isinstance(entry, PrefixEntry)
        return None if entry.is_removed else entry.states, tokens - index * self._block_size

    def check_invariants(self, of_entries: Sequence[dict[int, int]]) -> None:
        """Raise AssertionError unless every snapshot belongs to an entry or a sequence. For tests and debug runs."""
        all_homes = [*of_entries, *(sequence.states for sequence in self._sequences.values())]
        if self.snapshots is None:
            assert not any(all_homes), "snapshots of a model without states"
        else:
            self.snapshots.check_invariants(all_homes)
