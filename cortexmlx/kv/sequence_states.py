"""The snapshots of recurrent states that sequences and cached blocks own. Without mlx."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from cortexmlx.kv.prefix import Entry, Match, predecessor
from cortexmlx.kv.resume_points import FindMissing, at_block_ends, at_snapshots, whole_blocks, without_missing_blocks
from cortexmlx.kv.snapshots import NOTHING, Row, Save, Snapshots, StateOps
from cortexmlx.kv.table import SequenceBlocks


class SequenceStates:
    """The recurrent states of a `KVCache`. `sequences` are the cache's.

    Without `snapshots` the model has no recurrent states. Then a text can begin wherever its keys and values are
    cached, and these methods do nothing.
    """

    def __init__(self, block_size: int, snapshots: Snapshots | None, sequences: Mapping[int, SequenceBlocks]) -> None:
        self.snapshots = snapshots
        self._sequences = sequences
        self._block_size = block_size

    @property
    def needed(self) -> bool:
        """Whether the model has states."""
        return self.snapshots is not None

    def take(self, cuts: tuple[Save, ...] = ()) -> StateOps:
        """Return what the next step must do with states: see `Snapshots.take`."""
        return NOTHING if self.snapshots is None else self.snapshots.take(cuts)

    def resume_point(self, match: Match, tokens: Sequence[int], max_tokens: int, find_missing: FindMissing) -> Match:
        """Return the longest part of a match of `tokens` at whose end a sequence can begin: no block that it sees is
        missing, and a state exists if the model needs one.
        """
        if self.snapshots is None:
            return without_missing_blocks(match, find_missing, self._block_size)
        rest = tokens[match.chain : min(match.chain + self._block_size, max_tokens)]
        return self._first(at_snapshots(match, rest, self._block_size), find_missing)

    def resume_point_of_blocks(self, match: Match, find_missing: FindMissing) -> Match:
        """Return the longest such part without a partial block."""
        if self.snapshots is None:
            return without_missing_blocks(whole_blocks(match), find_missing, self._block_size)
        return self._first(at_block_ends(match, self._block_size), find_missing)

    def _first(self, parts: Iterator[Match], find_missing: FindMissing) -> Match:
        return next(part for part in parts if find_missing(part, part.tokens(self._block_size)) is None)

    def begin(self, sequence: SequenceBlocks, match: Match | None, taken_over: Entry | None) -> None:
        """Begin a sequence, with a match if there is one. `taken_over` is the removed entry whose block the sequence
        has taken over. Snapshots within the matched tokens move to the sequence.
        """
        if self.snapshots is None or match is None:
            return
        sequence.snapshot = match.snapshot
        if taken_over is not None:
            begin = sequence.length - match.partial_tokens
            for place in [place for place in taken_over.states if place <= match.partial_tokens]:
                self.snapshots.move(taken_over.states, place, sequence.states, begin + place)
            self.snapshots.drop_all(taken_over.states)

    def fork(self, source: SequenceBlocks, sequence: SequenceBlocks) -> None:
        """Begin `sequence` as a copy of the beginning of `source`."""
        if self.snapshots is not None and sequence.length:
            sequence.snapshot = self._at(source, sequence.length)

    def can_fork(self, seq: int, tokens: int) -> bool:
        """Return whether a copy of a sequence's first `tokens` tokens has the state that it needs."""
        return self.snapshots is None or not tokens or self._at(self._sequences[seq], tokens) is not None

    def attach(self, sequence: SequenceBlocks, entry: Entry | None, index: int) -> None:
        """Move the snapshots of a sequence's block at `index` to the block's entry, because the block is cached now."""
        begin = index * self._block_size
        if self.snapshots is None or entry is None:
            return
        for place in [p for p in sequence.states if begin < p <= begin + len(entry.tokens)]:
            self.snapshots.move(sequence.states, place, entry.states, place - begin)

    def drop(self, states: dict[int, int]) -> None:
        """Drop the snapshots of a sequence or an entry that is removed."""
        if self.snapshots is not None:
            self.snapshots.drop_all(states)

    def make(self, seq: int, tokens: int, spare: bool = False) -> int | None:
        """Return a new snapshot after a sequence's first `tokens` tokens. The caller must have the state kept. None if
        no snapshot is to be made. `spare` is that of `Snapshots.make`.
        """
        assert self.snapshots is not None
        home, place = self._home_of(self._sequences[seq], tokens)
        return None if home is None else self.snapshots.make(home, place, spare)

    def use(self, seq: int, tokens: int) -> None:
        """Mark the snapshot after a sequence's first `tokens` tokens as used, if there is one."""
        snapshot = None if self.snapshots is None else self._at(self._sequences[seq], tokens)
        if self.snapshots is not None and snapshot is not None:
            self.snapshots.order.use(snapshot)

    def continue_text(self, match: Match, kept: Container[int], parting: Entry | None) -> None:
        """Order the snapshots of a text that continues after a match: see `PointOrder.continue_text`."""
        if self.snapshots is None:
            return
        size, points = self._block_size, []
        for index, entry in enumerate(match.entries):
            points += [(index * size + place, entry.states[place]) for place in sorted(entry.states)]
        if match.partial is not None:
            states = match.partial.states
            begin = len(match.entries) * size
            points += [(begin + place, states[place]) for place in sorted(states) if place <= match.partial_tokens]
        self.snapshots.order.continue_text(points, kept, None if parting is None else parting.states.get(size))

    def enter(self, row: Row, seq: int) -> None:
        """Give a sequence's row the state of the snapshot that the sequence begins with."""
        sequence = self._sequences[seq]
        if self.snapshots is not None and sequence.snapshot is not None:
            self.snapshots.begin(row, sequence.length, sequence.snapshot)

    def leave(self, row: Row, seq: int, kept: int) -> None:
        """End a sequence's row. Its state after `kept` tokens is kept, unless `kept` is 0."""
        if self.snapshots is None:
            return
        snapshot = self.make(seq, kept) if kept else None
        if snapshot is not None:
            self.snapshots.save(row, kept, snapshot)
        self.snapshots.end(row)

    def _at(self, sequence: SequenceBlocks, tokens: int) -> int | None:
        home, place = self._home_of(sequence, tokens)
        return None if home is None else home.get(place)

    def _home_of(self, sequence: SequenceBlocks, tokens: int) -> tuple[dict[int, int] | None, int]:
        """Return the home of a snapshot after a sequence's first `tokens` tokens, and its place there.

        The home is None if the block belongs to another entry with the same tokens, and has been evicted.
        """
        index = (tokens - 1) // self._block_size
        if index >= sequence.registered:
            return sequence.states, tokens
        entry = predecessor(sequence.parent, sequence.registered - 1 - index)
        assert isinstance(entry, Entry)
        return None if entry.forgotten else entry.states, tokens - index * self._block_size

    def check_invariants(self, of_entries: Sequence[dict[int, int]]) -> None:
        """Raise AssertionError unless every snapshot belongs to an entry or a sequence. For tests and debug runs."""
        every = [*of_entries, *(sequence.states for sequence in self._sequences.values())]
        if self.snapshots is None:
            assert not any(every), "snapshots of a model without states"
        else:
            self.snapshots.check_invariants(every)
