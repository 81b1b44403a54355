"""A GroupStore with stubs of ranks, and a tier whose loads it reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cortexmlx.disk.tier import STATE, DiskLoad, DiskTier
from cortexmlx.distributed.disk.group_store import GroupStore
from cortexmlx.kv.prefix import Key, PrefixCache
from cortexmlx.kv.spec import KVSpec, LayerGroup
from support.hosts.stub_ranks import PART, StubRanks

SIZE = 4
TEXT = list(range(100, 141))
KEYS = PrefixCache(SIZE).keys(TEXT)
GROUPS = (LayerGroup(KVSpec(1, 4, 4, "float32"), (0,)),)


class Group:
    """A GroupStore with stubs of ranks, and a tier whose loads it reads. `later` has what is to be done later."""

    def __init__(self, disks: list[set[bytes]], states: bool = False) -> None:
        self.later: deque[Callable[[], None]] = deque()
        self.arrived: list[tuple[DiskLoad, Mapping[Key, Any]]] = []
        """The loads that somebody waits for, with what was read for them."""
        self.arrivals = self.can_join = 0
        self.unwanted: list[DiskLoad] = []
        self.tier = DiskTier(GROUPS, SIZE, states, lambda load: self.store.read(load), b"model")
        self.tier._may_have = lambda piece: self.store.may_have(piece)
        self.names = {self.tier.piece_key(key, g): (n, g) for n, key in enumerate(KEYS) for g in self.tier.every}
        self.begin(disks)

    def begin(self, disks: list[set[bytes]]) -> None:
        """Begin with new ranks."""
        self.ranks = StubRanks(disks)
        sizes = {0: PART, STATE: PART}
        ranks: Any = self.ranks
        self.store = GroupStore(ranks, Path("/kv"), 1 << 30, sizes, self.later.append, self._arrived, self._join)

    def _arrived(self, load: DiskLoad, found: Mapping[Key, Any]) -> None:
        self.arrivals += 1
        assert load.pieces is None, "a load arrives twice"
        wanted = not any(load is each for each in self.unwanted)
        load.pieces = found if wanted else {}
        if wanted:
            self.arrived.append((load, found))

    def _join(self) -> None:
        self.can_join += 1

    def run(self) -> None:
        """Do what was to be done later."""
        while self.later:
            self.later.popleft()()

    def keep(self, places: list[int], group: int = 0) -> Any:
        keys = [self.tier.piece_key(KEYS[place], group) for place in places]
        return self.store.keep(group, places, keys, [tuple(TEXT[p * SIZE : p * SIZE + SIZE]) for p in places])

    def load(self, blocks: int = 0, seconds_per_token: float = 1e9) -> DiskLoad | None:
        """Start to read a load, as an admission does. None if nothing is worth asking for."""
        load = self.tier.make_load(TEXT, KEYS, blocks, blocks * SIZE, len(TEXT) - 1, seconds_per_token)
        if load is not None:
            self.tier.start(load)
        return load

    def settle(self) -> None:
        """Let every rank write, read and tell all."""
        for number, rank in enumerate(self.ranks.each):
            while rank.writing:
                rank.write()
            while rank.reading:
                rank.read()
            while rank.telling:
                self.ranks.deliver(number)
        self.run()
