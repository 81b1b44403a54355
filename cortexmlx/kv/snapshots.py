"""Snapshots of recurrent states: which exist, where a text can begin from one, and which is dropped next. Without mlx.

The keys and values of a text's beginning are part of those of the text. A recurrent state is not: it exists only at the
tokens after which it was kept. A snapshot belongs to its *home*. That is the sequence that computed it, and later the
cached entry of the block of its last token. It is dropped with that block. All snapshots have the same size. When their
number is at the limit, the first in the `PointOrder` is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cortexmlx.kv.resume_points import PointOrder

Row = tuple[int, int]
"""Names a row's state: its job, and the job's generation when it got the row."""


@dataclass(frozen=True)
class Save:
    """Keep the state of `row` after `tokens` tokens as snapshot `snapshot`."""

    row: Row
    tokens: int
    snapshot: int


@dataclass(frozen=True)
class StateOps:
    """What a step does with states, in this order: `saves`, `begins`, `drops`, `ends`, and `cuts` during the step."""

    saves: tuple[Save, ...] = ()
    """Snapshots of states that the last steps computed."""
    begins: tuple[Save, ...] = ()
    """Rows that begin with the state of a snapshot."""
    drops: tuple[int, ...] = ()
    """Snapshots that are no longer needed."""
    ends: tuple[Row, ...] = ()
    """Rows whose states are no longer needed."""
    cuts: tuple[Save, ...] = ()
    """Snapshots of states that this step computes within its pieces."""


NOTHING = StateOps()

Home = dict[int, int]
"""Snapshots by the number of tokens, of the sequence or of the block, that they come after."""


class Snapshots:
    """At most `most` snapshots, and what the next step must do with rows' states."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.order: PointOrder[int] = PointOrder()
        self._homes: dict[int, tuple[Home, int]] = {}
        self._count = 0
        self._saves: list[Save] = []
        self._begins: list[Save] = []
        self._drops: list[int] = []
        self._ends: list[Row] = []

    def __len__(self) -> int:
        return len(self._homes)

    def all(self) -> set[int]:
        """Return the numbers of all snapshots."""
        return set(self._homes)

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def make(self, home: Home, place: int, spare: bool = False) -> int | None:
        """Return the number of a new snapshot at `place` of a home. The caller must have the state kept. None if there
        is a snapshot at that place already, or if no snapshots are allowed.

        A `spare` one begins as superseded, and takes the place of no other than such.
        """
        if place in home:
            if not spare:
                self.order.use(home[place])
            return None
        if not self.most or (spare and len(self._homes) >= self.most and not self.order.some_superseded):
            return None
        while len(self._homes) >= self.most:
            self._drop(next(iter(self.order)))
        self._count += 1
        home[place] = self._count
        self._homes[self._count] = (home, place)
        self.order.add(self._count, spare)
        return self._count

    def move(self, home: Home, place: int, to: Home, there: int) -> None:
        """Move a snapshot to another home. Drop it if that place has a snapshot already."""
        snapshot = home[place]
        if there in to:
            self._drop(snapshot)
            return
        del home[place]
        to[there] = snapshot
        self._homes[snapshot] = (to, there)

    def drop_all(self, home: Home) -> None:
        """Drop all snapshots of a home."""
        for snapshot in list(home.values()):
            self._drop(snapshot)

    def _drop(self, snapshot: int) -> None:
        home, place = self._homes.pop(snapshot)
        self.order.discard(snapshot)
        del home[place]
        self._drops.append(snapshot)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def save(self, row: Row, tokens: int, snapshot: int) -> None:
        """Have a row's state after its first `tokens` tokens kept as a new snapshot. The row's last step computed that
        state.
        """
        self._saves.append(Save(row, tokens, snapshot))

    def begin(self, row: Row, tokens: int, snapshot: int) -> None:
        """Have a row begin with a snapshot's state, that after `tokens` tokens. The snapshot may have been dropped
        while the row got its blocks; it exists until the next step.
        """
        if snapshot in self._homes:
            self.order.use(snapshot)
        self._begins.append(Save(row, tokens, snapshot))

    def end(self, row: Row) -> None:
        """Have a row's state dropped."""
        self._ends.append(row)

    def take(self, cuts: tuple[Save, ...] = ()) -> StateOps:
        """Return all that has to be done since the last call. `cuts` are those of the step that will do it.

        A dropped snapshot is not saved, unless a row begins with it.
        """
        begun = {begin.snapshot for begin in self._begins}
        saves = tuple(s for s in self._saves if s.snapshot in self._homes or s.snapshot in begun)
        cuts = tuple(s for s in cuts if s.snapshot in self._homes)
        ops = StateOps(saves, tuple(self._begins), tuple(self._drops), tuple(self._ends), cuts)
        for done in (self._saves, self._begins, self._drops, self._ends):
            done.clear()
        return ops

    def check_invariants(self, homes: Sequence[Home]) -> None:
        """Raise AssertionError unless `homes` have exactly the known snapshots, each at its place."""
        hanging = {snapshot: (id(home), place) for home in homes for place, snapshot in home.items()}
        known = {snapshot: (id(home), place) for snapshot, (home, place) in self._homes.items()}
        assert hanging == known, "a snapshot hangs elsewhere than is known"
        assert sum(map(len, homes)) == len(known) <= self.most, "a snapshot hangs twice, or there are too many"
        assert set(self.order) == known.keys(), "a snapshot is in no order, or one that is gone"
