"""Pinned prefixes: cached beginnings of prompts that are evicted last. Without mlx."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from cortexmlx.errors import InvalidRequest, PinRefused
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.prefix import Key, Salt

MAX_PINNED_SHARE = 0.5
"""The share of a group's blocks, and of the snapshots, that pins may have. Rows need the others."""


@dataclass(frozen=True)
class PinnedKeys:
    """The cache keys of the full blocks of a pinned text."""

    keys: tuple[Key, ...]
    """All of them, in order."""
    group_keys: tuple[tuple[Key, ...], ...]
    """For each group, those that the last token of these blocks sees: a prompt that is just this text computes its last
    token.
    """


class PinnedPrefixes:
    """The pinned texts of a cache. Pins name blocks by key, so they cover blocks computed later or after eviction."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._chains: dict[int, PinnedKeys] = {}  # by the pin's number, as are snapshots, names and deadlines
        self._snapshots: dict[int, int] = {}
        self._names: dict[str, int] = {}
        self._deadlines: dict[int, float] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._chains)

    @property
    def blocks(self) -> int:
        """The number of pinned blocks of all groups that are cached now."""
        return self._cache.pools.pinned_blocks

    def add(self, tokens: Sequence[int], salt: Salt, seconds: float | None = None) -> tuple[int, int]:
        """Pin the full blocks of `tokens` under `salt`, for `seconds` (None: until `remove`). Return the pin's number,
        and how many tokens are pinned.

        Raises InvalidRequest if there is no full block, PinRefused if pins would exceed their share.
        """
        size = self._cache.block_size
        keys = tuple(self._cache.prefix.keys(tokens, salt))
        if not keys:
            raise InvalidRequest(f"a pin holds whole blocks of {size} tokens, and this has {len(tokens)} tokens")
        last = len(keys) * size - 1
        fronts = (group.spec.attention_window.first_visible_block(last, size) for group in self._cache.groups)
        chain = PinnedKeys(keys, tuple(keys[front:] for front in fronts))
        self.remove_expired()
        self._require_room(chain)
        number = next(self._numbers)
        if seconds is not None:
            self._deadlines[number] = time.monotonic() + seconds
        self._pin_blocks(number, chain)
        return number, len(keys) * size

    def _require_room(self, chain: PinnedKeys) -> None:
        """Raise PinRefused if, with this pin, pins would have more than their share of the blocks or snapshots."""
        cache = self._cache
        for group, keys in enumerate(chain.group_keys):
            have, group_blocks = cache.pools.pinned_keys(group), cache.pools.configured_blocks[group]
            max_pinned = int(group_blocks * MAX_PINNED_SHARE)
            new = len(set(keys) - have)
            if new and len(have) + new > max_pinned:
                raise PinRefused(
                    f"the pin takes {new} blocks of {cache.block_size} tokens beside {len(have)} that are pinned, and "
                    f"pins may have {max_pinned} of {group_blocks}: unpin something, or raise the KV memory "
                    "(--kv-memory)"
                )
        snapshots = cache.states.snapshots
        if snapshots is not None and len(self._chains) >= (
            max_pinned := int(snapshots.max_snapshots * MAX_PINNED_SHARE)
        ):
            raise PinRefused(
                f"{len(self._chains)} texts are pinned, and the memory for recurrent states has room for {max_pinned}: "
                "unpin something, or raise the KV memory (--kv-memory)"
            )

    def _pin_blocks(self, number: int, chain: PinnedKeys) -> None:
        """Pin the blocks of a text in all groups, under a pin's number."""
        self._chains[number] = chain
        for group, keys in enumerate(chain.group_keys):
            self._cache.pools.pin(group, keys)

    def pin_state(self, number: int) -> None:
        """Pin the last recurrent state of a pin's text, after the text has been computed."""
        snapshots, chain = self._cache.states.snapshots, self._chains.get(number)
        entry = None if chain is None else self._cache.prefix.get(chain.keys[-1])
        if snapshots is not None and entry is not None and entry.states:
            self._snapshots[number] = entry.states[max(entry.states)]
            snapshots.order.pin(self._snapshots[number])

    def pin_recomputed_states(self) -> None:
        """Pin the recurrent states of pinned texts that were dropped and computed again."""
        snapshots = self._cache.states.snapshots
        if snapshots is not None and self._chains:
            existing_numbers = snapshots.numbers()
            for number in self._chains:
                if self._snapshots.get(number) not in existing_numbers:
                    self.pin_state(number)

    def give_name(self, number: int, name: str) -> None:
        """Name a pin. Another pin of this name is removed."""
        self.remove(self._names.get(name, -1))
        self._names[name] = number

    def remove_expired(self) -> None:
        """Remove the pins whose time is over."""
        now = time.monotonic()
        for number in [number for number, deadline in self._deadlines.items() if deadline <= now]:
            self.remove(number)

    def remove(self, number: int) -> None:
        """Remove a pin. Does nothing if it does not exist."""
        chain = self._chains.pop(number, None)
        self._deadlines.pop(number, None)
        self._names = {name: other for name, other in self._names.items() if other != number}
        for group, keys in enumerate(chain.group_keys if chain is not None else ()):
            self._cache.pools.unpin(group, keys)
        snapshot = self._snapshots.pop(number, None)
        snapshots = self._cache.states.snapshots
        if snapshots is not None and snapshot is not None and snapshot not in self._snapshots.values():
            snapshots.order.unpin(snapshot)

    def move_to_cache(self, cache: KVCache) -> None:
        """Make the same pins in a new, empty cache."""
        self._cache = cache
        self._snapshots.clear()
        for number, chain in self._chains.items():
            self._pin_blocks(number, chain)
