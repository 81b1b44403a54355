"""Snapshots of recurrent states: which there are, where a text can be begun from one, and which goes first. No mlx.

Keys and values of any beginning of a text are there as soon as those of the text are. A state is not: it can be had
only at the places where it was kept. A snapshot hangs at its *home*: the sequence that computed it, and from when the
block of its last token is cached on, that block's entry. So it goes when the block goes. All are of one size, and when
there are as many as may be, the one goes that was not begun from or made for the longest time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

Row = tuple[int, int]
"""Names a row's state: its job, and the job's generation when it got the row."""


@dataclass(frozen=True)
class Save:
    """The state of `row` after `tokens` tokens is kept as snapshot `snapshot`."""

    row: Row
    tokens: int
    snapshot: int


@dataclass(frozen=True)
class StateOps:
    """Carried out in this order: before the step `saves` of states that there are, `begins` (a row begins with a
    snapshot's state), `drops` of snapshots, `ends` of rows; then in the step `cuts`, saves of states that the step
    computes on its way.
    """

    saves: tuple[Save, ...] = ()
    begins: tuple[Save, ...] = ()
    drops: tuple[int, ...] = ()
    ends: tuple[Row, ...] = ()
    cuts: tuple[Save, ...] = ()


NOTHING = StateOps()

Home = dict[int, int]
"""Snapshots by place: how many tokens of the sequence, or of the block, they come after."""


class Snapshots:
    """At most `most` snapshots, and what is to be done about rows' states in the next step."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._homes: OrderedDict[int, tuple[Home, int]] = OrderedDict()
        self._pinned: set[int] = set()
        self._count = 0
        self._saves: list[Save] = []
        self._begins: list[Save] = []
        self._drops: list[int] = []
        self._ends: list[Row] = []

    def __len__(self) -> int:
        return len(self._homes)

    def all(self) -> set[int]:
        """Their names."""
        return set(self._homes)

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def make(self, home: Home, place: int) -> int | None:
        """A new snapshot at a home; None if there is one at that place, or none may be. Whoever makes it sees to it
        that the state is kept.
        """
        if place in home:
            self.use(home[place])
            return None
        if not self.most:
            return None
        while len(self._homes) >= self.most:
            self._drop(next((s for s in self._homes if s not in self._pinned), next(iter(self._homes))))
        self._count += 1
        home[place] = self._count
        self._homes[self._count] = (home, place)
        return self._count

    def pin(self, snapshot: int) -> None:
        """It goes after all others."""
        self._pinned.add(snapshot)

    def unpin(self, snapshot: int) -> None:
        """The opposite."""
        self._pinned.discard(snapshot)

    def use(self, snapshot: int) -> None:
        """A sequence begins here, or would have made it: it goes last."""
        self._homes.move_to_end(snapshot)

    def move(self, home: Home, place: int, to: Home, there: int) -> None:
        """Hang a snapshot elsewhere; it goes if another is there."""
        snapshot = home[place]
        if there in to:
            self._drop(snapshot)
            return
        del home[place]
        to[there] = snapshot
        self._homes[snapshot] = (to, there)

    def drop_all(self, home: Home) -> None:
        """The home goes, and its snapshots with it."""
        for snapshot in list(home.values()):
            self._drop(snapshot)

    def _drop(self, snapshot: int) -> None:
        home, place = self._homes.pop(snapshot)
        self._pinned.discard(snapshot)
        del home[place]
        self._drops.append(snapshot)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def save(self, row: Row, tokens: int, snapshot: int) -> None:
        """A new snapshot is a row's state after so many of its tokens, which its last step computed."""
        self._saves.append(Save(row, tokens, snapshot))

    def begin(self, row: Row, tokens: int, snapshot: int) -> None:
        """A row begins with a snapshot's state, that after so many tokens. It may have gone while the row got its
        blocks: it is there until the next step.
        """
        if snapshot in self._homes:
            self.use(snapshot)
        self._begins.append(Save(row, tokens, snapshot))

    def end(self, row: Row) -> None:
        """A row's state is not needed any more."""
        self._ends.append(row)

    def take(self, cuts: tuple[Save, ...] = ()) -> StateOps:
        """All that is to be done since it was asked last; `cuts` are those of the step that does it.

        A snapshot that has gone is not made, unless a row begins with it: it is there until then.
        """
        begun = {begin.snapshot for begin in self._begins}
        saves = tuple(s for s in self._saves if s.snapshot in self._homes or s.snapshot in begun)
        cuts = tuple(s for s in cuts if s.snapshot in self._homes)
        ops = StateOps(saves, tuple(self._begins), tuple(self._drops), tuple(self._ends), cuts)
        for done in (self._saves, self._begins, self._drops, self._ends):
            done.clear()
        return ops

    def check_invariants(self, homes: Sequence[Home]) -> None:
        """Raise AssertionError unless each snapshot hangs at its place at one of these homes, and nothing else."""
        hanging = {snapshot: (id(home), place) for home in homes for place, snapshot in home.items()}
        known = {snapshot: (id(home), place) for snapshot, (home, place) in self._homes.items()}
        assert hanging == known, "a snapshot hangs elsewhere than is known"
        assert sum(map(len, homes)) == len(known) <= self.most, "a snapshot hangs twice, or there are too many"
