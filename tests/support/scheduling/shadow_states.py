"""The states of recurrent layers as numbers: what a shadow knows of each row is the number of its newest token, and
that is what the row's state must be when it goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.snapshots import Row, StateOps
from cortexmlx.scheduling.plan import StepPlan


class Numbers(Protocol):
    """What a request must compute."""

    def number(self, position: int) -> int: ...


WRONG = -7
"""The number of a drafted token that is wrong."""


class ShadowStates:
    """Rows' states after their last step, by the tokens that they come after: several where drafts may be taken back;
    and snapshots, with the tokens that they come after. Each is the number of its newest token.
    """

    def __init__(self, cache: KVCache, stories: Mapping[int, Numbers]) -> None:
        self._cache = cache
        self._stories = stories
        self._rows: dict[Row, dict[int, int]] = {}
        self._snapshots: dict[int, tuple[int, int]] = {}

    def carry_out(self, plan: StepPlan, right_ends: Mapping[int, int]) -> None:
        """What a step does with states. All rows must have the state of the text so far. Drafts are right up to
        `right_ends`, by job.
        """
        if not self._cache.states.has_states:
            assert plan.states == StateOps()
            return
        self.settle(plan.states)
        cuts = {(cut.row, cut.tokens): cut.snapshot for cut in plan.states.cuts}
        assert len(cuts) == len(plan.states.cuts)
        for segment in plan.segments:
            row, end = (segment.job, segment.generation), segment.first + segment.count
            if not segment.live:
                continue
            wanted = self._after(segment.job, segment.first)[1] if segment.first else None
            found = self._rows.get(row, {}).get(segment.first)
            assert found == wanted, f"job {segment.job} goes on with a state that is not its own"
            for place in range(segment.first + 1, end + 1):
                if (row, place) in cuts:
                    assert len(segment.logits) < 2 or place <= segment.logits.start + 1, "a state after a draft is kept"
                    self._snapshots[cuts.pop((row, place))] = self._after(segment.job, place)
            places = range(segment.first, end + 1) if len(segment.logits) > 1 else [end]
            right = right_ends[segment.job]
            self._rows[row] = {p: self._after(segment.job, p)[1] if p <= right else WRONG for p in places if p}
        assert not cuts, "a state is to be kept that the step does not compute"

    def restore(self, snapshot: int, numbers: Sequence[int]) -> None:
        """Load a snapshot from disk."""
        assert snapshot not in self._snapshots
        tokens, number = numbers
        self._snapshots[snapshot] = int(tokens), int(number)

    def snapshot(self, name: int) -> tuple[int, int] | None:
        """The tokens that a snapshot comes after, and their number; None if it is not saved yet."""
        return self._snapshots.get(name)

    def settle(self, ops: StateOps) -> None:
        """What is done before a step, or when nothing is left to do."""
        for save in ops.saves:
            assert save.snapshot not in self._snapshots
            self._snapshots[save.snapshot] = save.tokens, self._rows[save.row][save.tokens]
        for begin in ops.begins:
            assert begin.row not in self._rows and self._snapshots[begin.snapshot][0] == begin.tokens
            self._rows[begin.row] = dict([self._snapshots[begin.snapshot]])
        for snapshot in ops.drops:
            self._snapshots.pop(snapshot, None)
        for row in ops.ends:
            self._rows.pop(row, None)

    def nothing_is_left_but_snapshots(self) -> None:
        """When nothing runs, no row has a state; all snapshots are those that the cache knows."""
        self.settle(self._cache.states.take_ops())
        assert not self._rows, "the state of a row that is gone is still there"
        snapshots = self._cache.states.snapshots
        assert self._snapshots.keys() == (set() if snapshots is None else snapshots.numbers()), "a snapshot is lost"

    def _after(self, job: int, tokens: int) -> tuple[int, int]:
        return tokens, self._stories[job].number(tokens - 1)
