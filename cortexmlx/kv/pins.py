"""Pins: cached beginnings of prompts that are evicted last. No mlx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from cortexmlx.errors import InvalidRequest, PinRefused
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.prefix import Key

SHARE = 0.5
"""Of the blocks of a group, and of the snapshots, how many pins may have: the rest is for rows, which must run."""


@dataclass(frozen=True)
class PinnedKeys:
    """What a pin holds: the keys of the whole blocks of a text, of each group those that its last token sees: a
    prompt that ends there computes that one again.
    """

    keys: tuple[Key, ...]
    of_groups: tuple[tuple[Key, ...], ...]


class Pins:
    """The pins of a cache. A pin names blocks by their keys, so it holds whatever has these keys: blocks that are yet
    to be computed, or are again after they had to go.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._chains: dict[int, PinnedKeys] = {}
        self._snapshots: dict[int, int] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._chains)

    @property
    def blocks(self) -> int:
        """Blocks of all groups that are there for them."""
        return self._cache.pools.pinned_blocks

    def add(self, tokens: Sequence[int], salt: str | None) -> tuple[int, int]:
        """Pin the whole blocks of `tokens`, which are shared under `salt`. Returns the pin's number, and how many
        tokens it has. Raises InvalidRequest if there is no whole block, PinRefused if pins would have more than their
        share.
        """
        size = self._cache.block_size
        keys = tuple(self._cache.prefix.keys(tokens, salt))
        if not keys:
            raise InvalidRequest(f"a pin holds whole blocks of {size} tokens, and this has {len(tokens)} tokens")
        last = len(keys) * size - 1
        fronts = (group.spec.attention_window.first_block(last, size) for group in self._cache.groups)
        chain = PinnedKeys(keys, tuple(keys[front:] for front in fronts))
        self._check(chain)
        number = next(self._numbers)
        self._add(number, chain)
        return number, len(keys) * size

    def _check(self, chain: PinnedKeys) -> None:
        cache = self._cache
        for group, keys in enumerate(chain.of_groups):
            have, most = cache.pools.pinned_keys(group), int(cache.pools.max_blocks[group] * SHARE)
            new = len(set(keys) - have)
            if new and len(have) + new > most:
                raise PinRefused(
                    f"the pin takes {new} blocks of {cache.block_size} tokens beside {len(have)} that are pinned, and "
                    f"pins may have {most} of {cache.pools.max_blocks[group]}: unpin something, or raise the KV memory "
                    "(--kv-memory)"
                )
        snapshots = cache.states.snapshots
        if snapshots is not None and len(self._chains) >= (most := int(snapshots.most * SHARE)):
            raise PinRefused(
                f"{len(self._chains)} texts are pinned, and the memory for recurrent states has room for {most}: unpin "
                "something, or raise the KV memory (--kv-memory)"
            )

    def _add(self, number: int, chain: PinnedKeys) -> None:
        self._chains[number] = chain
        for group, keys in enumerate(chain.of_groups):
            self._cache.pools.pin(group, keys)

    def settle(self, number: int) -> None:
        """The text of a pin was computed: its newest recurrent state goes last, too."""
        snapshots, chain = self._cache.states.snapshots, self._chains.get(number)
        entry = None if chain is None else self._cache.prefix.get(chain.keys[-1])
        if snapshots is not None and entry is not None and entry.states:
            self._snapshots[number] = entry.states[max(entry.states)]
            snapshots.pin(self._snapshots[number])

    def settle_again(self) -> None:
        """Texts whose states had to go were computed again since, perhaps."""
        snapshots = self._cache.states.snapshots
        if snapshots is not None and self._chains:
            there = snapshots.all()
            for number in self._chains:
                if self._snapshots.get(number) not in there:
                    self.settle(number)

    def remove(self, number: int) -> None:
        """Let go of a pin; nothing happens if there is none."""
        chain = self._chains.pop(number, None)
        for group, keys in enumerate(chain.of_groups if chain is not None else ()):
            self._cache.pools.unpin(group, keys)
        snapshot = self._snapshots.pop(number, None)
        snapshots = self._cache.states.snapshots
        if snapshots is not None and snapshot is not None and snapshot not in self._snapshots.values():
            snapshots.unpin(snapshot)

    def move_to(self, cache: KVCache) -> None:
        """The same pins, with nothing to hold yet, for a cache that begins empty."""
        self._cache = cache
        self._snapshots.clear()
        for number, chain in self._chains.items():
            self._add(number, chain)
