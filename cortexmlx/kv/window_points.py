"""The resume points of layers with windows: places in cached texts whose windows' blocks are kept together.

A text can begin only where the blocks of all its windows are cached, and a single one that is missing makes the others
useless. So blocks that no point needs are evicted first, and then one point after the other, whole. Without mlx.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from cortexmlx.kv.pool import BlockPool
from cortexmlx.kv.prefix import GONE, Entry, Match, Node
from cortexmlx.kv.resume_points import PointOrder
from cortexmlx.kv.spec import LayerGroup

Needed = tuple[tuple[int, Entry], ...]
"""Blocks, each by its group and its entry."""


class WindowPoints:
    """The resume points of the windowed groups among `groups`, whose blocks are in `pools`. A point is named by the
    entry of the last block before it. Without windows there are none.
    """

    def __init__(self, groups: Sequence[LayerGroup], pools: Sequence[BlockPool], block_size: int) -> None:
        self._windows = {
            g: group.spec.attention_window for g, group in enumerate(groups) if group.spec.window is not None
        }
        self._pools = pools
        self._block_size = block_size
        self._order: PointOrder[Entry] = PointOrder()
        self._needed: dict[Entry, Needed] = {}

    def __len__(self) -> int:
        return len(self._order)

    def add(self, node: Node, tokens: int, spare: bool = False) -> None:
        """Make a point after the first `tokens` tokens of a text, of which `node` has the last one. Nothing happens if
        a block that it needs is not cached. A `spare` point begins as superseded.
        """
        if not self._windows or not isinstance(node, Entry) or node.transient or node.forgotten:
            return
        if node in self._needed:
            if not spare:
                self._order.use(node)
            return
        needed = tuple(self._seen(node, tokens))
        if any(entry.forgotten or entry.blocks[group] == GONE for group, entry in needed):
            return
        self._needed[node] = needed
        self._order.add(node, spare)
        for group, entry in needed:
            self._pools[group].need(entry, entry.blocks[group])

    def _seen(self, last: Entry, tokens: int) -> Iterator[tuple[int, Entry]]:
        """Yield the blocks that the token after a text's first `tokens` tokens sees, the last one first."""
        index = (tokens - 1) // self._block_size
        for group, window in self._windows.items():
            node: Node = last
            for _ in range(index - window.first_block(tokens, self._block_size) + 1):
                assert isinstance(node, Entry), "a chain is shorter than its text"
                yield group, node
                node = node.parent

    def discard(self, entry: Entry) -> None:
        """Give a point up, if there is one."""
        self._order.discard(entry)
        for group, needed in self._needed.pop(entry, ()):
            self._pools[group].need_no_more(needed, needed.blocks[group])

    def give_way(self, group: int) -> None:
        """Give points up, the first in their order, until a block of a group is evictable that only points kept."""
        waiting = self._pools[group].needed
        while waiting and not self._pools[group].passed:
            self.discard(next(point for point in self._order if self._keeps(point, group)))

    def _keeps(self, point: Entry, group: int) -> bool:
        """Return whether a block of a group that has no owner is kept for a point."""
        waiting = self._pools[group].needed
        return any(g == group and waiting.get(entry.blocks[g]) is entry for g, entry in self._needed[point])

    def continue_text(self, match: Match, kept: Container[int], parting: Entry | None) -> None:
        """Order the points of a text that continues after a match: see `PointOrder.continue_text`."""
        if self._windows:
            size = self._block_size
            points = [((i + 1) * size, entry) for i, entry in enumerate(match.entries) if entry in self._needed]
            self._order.continue_text(points, kept, parting)

    def check_invariants(self) -> None:
        """Raise AssertionError if a block is kept for no point, or evictable though a point needs it. For tests and
        debug runs.
        """
        assert set(self._order) == self._needed.keys(), "a point is in no order, or one that is gone"
        assert not any(point.forgotten for point in self._needed), "a point of an entry that is gone"
        for group, pool in enumerate(self._pools):
            counts: dict[Entry, int] = {}
            for needed in self._needed.values():
                for g, entry in needed:
                    if g == group:
                        counts[entry] = counts.get(entry, 0) + 1
            assert counts == dict(pool.points), f"group {group}: points and what they need disagree"
            waits = (*pool.passed.values(), *pool.unused.values())
            assert not any(entry in counts for entry in waits), f"group {group}: a point may lose a block"
            assert all(entry in counts for entry in pool.needed.values()), f"group {group}: no point needs a block"
