"""A disk tier that holds numbers, for a `Shadow`. It checks what it is given to store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from cortexmlx.disk.tier import STATE, DiskLoad, DiskTier
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.prefix import Key, PrefixEntry, PrefixNode


@dataclass(frozen=True)
class Numbers:
    """The content of a piece: the numbers of a block's tokens `[block_size]`, or a state's tokens and number `[2]`."""

    arrays: tuple[np.ndarray, ...]


@dataclass
class ShadowDisk:
    """Keeps what leaves the cache, and answers requests when it is told to. `number(before, token)` is the number of a
    token after a position's number, `read(group, target)` what a block or a snapshot holds.
    """

    cache: KVCache
    number: Callable[[int | None, int], int]
    pieces: dict[Key, Numbers] = field(default_factory=dict)
    requested: list[DiskLoad] = field(default_factory=list)

    def __post_init__(self) -> None:
        states = self.cache.states
        self.tier = DiskTier(
            self.cache.groups,
            self.cache.block_size,
            states.has_states,
            self.requested.append,
            b"a model",
            may_have=self.pieces.__contains__,
        )
        self.cache.disk_tier = self.tier

    def store(self, most: int, read: Callable[[int, int], tuple[int, ...] | None]) -> None:
        """Keep the pieces of up to `most` entries, as `disk/connector.py` does between two steps. A state
        that the next step is to save cannot be read yet.
        """
        for entry in islice(self.tier.pop_entries(), most):
            numbers = self._numbers(entry)
            for group, target in tuple(self.tier.unstored_pieces(entry)):
                wanted = (len(numbers), numbers[-1]) if group == STATE else tuple(numbers[-self.cache.block_size :])
                found = read(group, target)
                if found is None:
                    continue
                assert found == wanted, f"a cached piece of group {group} is not that of its text"
                self.pieces[self.tier.piece_key(entry.key, group)] = Numbers((np.array(found, np.int64),))
                self.tier.mark_stored(entry, group)

    def answer(self, arrived: Callable[[DiskLoad, dict[Key, Numbers]], None], count: int, all_of_it: bool) -> None:
        """Tell `arrived` what is there for the oldest `count` loads: every piece, or those that it takes."""
        for load in self.requested[:count]:
            there = {key: self.pieces[key] for key in load.requested_pieces() if key in self.pieces}
            wanted: Iterable[Key] = there if all_of_it else load.choose_pieces(dict.fromkeys(there, 1), 1e12)
            arrived(load, {key: there[key] for key in wanted})
        del self.requested[:count]

    def _numbers(self, entry: PrefixEntry) -> list[int]:
        """Those of all tokens of a text up to the end of an entry."""
        chain: list[PrefixEntry] = []
        node: PrefixNode = entry
        while isinstance(node, PrefixEntry):
            chain.append(node)
            node = node.parent
        numbers: list[int] = []
        for part in reversed(chain):
            for token in part.tokens:
                numbers.append(self.number(numbers[-1] if numbers else None, token))
        return numbers
