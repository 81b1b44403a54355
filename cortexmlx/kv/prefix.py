"""The prefix cache: a hash index of cached blocks by the tokens they hold, so that a prompt's cached beginning is not
computed again.

A full block's key is a hash of the key of the block before it and of its own tokens. So equal keys mean equal text from
the very beginning. A key is never trusted alone: a hit must also have the right tokens and the right predecessor.

Each chain begins at a root, and each *salt* has its own root. So a text stored under one salt is never found under
another: neither whole nor in part, nor by the time that a look-up takes. The keys do not contain the model, since a
cache belongs to one engine. The disk tier, which engines share, adds the model.

An entry names one block in each layer group. The blocks of windowed groups may be evicted alone (`GONE`). A text that
begins later does not see them, so the entry stays in its chain. `BlockPools` knows who owns a block, and which block is
evicted next. All operations take constant time per block. Without mlx.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np

Key = bytes
Blocks = tuple[int, ...]
"""The block of each layer group that holds the same tokens."""

GONE = -1
"""Stands for a block that is no longer cached, or never was."""

_MAX_COMPARED_CHILDREN = 16
"""How many successors of a block are compared for a partial match, the newest first. It bounds the work."""


class AdapterSalt(NamedTuple):
    """The salt that separates cached texts of a client with an adapter from all others."""

    adapter: bytes
    """A hash of its content."""
    client: str | None


Salt = str | AdapterSalt | None
"""Under which texts are found: a client's name; None for those who have none."""


@dataclass(eq=False)
class PrefixNode:
    """A node in the tree of cached blocks, and the entries that follow it. A node that is no entry is a root."""

    key: Key
    children: OrderedDict[Key, PrefixEntry] = field(default_factory=OrderedDict, kw_only=True)


@dataclass(eq=False)
class PrefixEntry(PrefixNode):
    """A cached block in all layer groups, with its tokens and its predecessor."""

    parent: PrefixNode
    """The entry of the block before this one, or the root."""
    tokens: tuple[int, ...]
    """The tokens of the block. Fewer than a full block's make a partial block."""
    blocks: Blocks
    """The block of each group, or `GONE`."""
    states: dict[int, int] = field(default_factory=dict, kw_only=True)
    """Snapshots of recurrent states, by the number of this block's tokens that they come after."""
    on_disk: frozenset[int] = field(default=frozenset(), kw_only=True)
    """The groups, or `STATE`, whose piece of this entry is on disk, or was given to the writer, which may drop it."""
    transient: bool = field(default=False, kw_only=True)
    """Whether only transient sequences have used it: see `KVCache.allocate_for`."""
    is_removed: bool = field(default=False, kw_only=True)
    """Whether the entry has been removed. A sequence may still continue from it."""


@dataclass(frozen=True)
class PrefixMatch:
    """The result of a prefix cache look-up: the cached blocks with which a prompt begins."""

    root: PrefixNode
    """Where the chain begins."""
    entries: tuple[PrefixEntry, ...]
    """The full blocks, in order."""
    partial: PrefixEntry | None
    """The entry of the block after them, of which the first `partial_tokens` tokens match."""
    partial_tokens: int
    snapshot: int | None = None
    """The recurrent state at the end of the match, for models that need one."""
    chain: int = 0
    """How many tokens of full blocks are cached, also where the match ends earlier because there is no snapshot at
    their end.
    """

    def matched_tokens(self, block_size: int) -> int:
        """Return how many tokens match."""
        return len(self.entries) * block_size + self.partial_tokens

    def entry_at(self, index: int) -> PrefixEntry:
        """Return the entry of the block at an index. The partial block comes last."""
        entry = self.entries[index] if index < len(self.entries) else self.partial
        assert entry is not None
        return entry

    @property
    def last_node(self) -> PrefixNode:
        """The node of the last full block of the match, or the root."""
        return self.entries[-1] if self.entries else self.root


def chain_hash(parent: Key, tokens: Sequence[int]) -> Key:
    """Return the key of a block: a hash of the key of the block before it and of its tokens."""
    return hashlib.blake2b(parent + np.asarray(tokens, np.int32).tobytes(), digest_size=16).digest()


class PrefixCache:
    """The prefix cache: all entries by key. Tests may pass another `hash_function`."""

    def __init__(self, block_size: int, hash_function: Callable[[Key, Sequence[int]], Key] = chain_hash) -> None:
        self.block_size = block_size
        self._hash = hash_function
        self._entries: dict[Key, PrefixEntry] = {}
        self._roots: WeakValueDictionary[Salt, PrefixNode] = WeakValueDictionary()

    # -- looking up ---------------------------------------------------------------------------------------------------

    def root(self, salt: Salt = None) -> PrefixNode:
        """Return the root node of the texts under a salt. It lives as long as a cached block or sequence follows it."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = PrefixNode(self._root_key(salt))
        return root

    def _root_key(self, salt: Salt) -> Key:
        """Return the key of a salt's root. No block has this key."""
        if salt is None:
            return hashlib.blake2b(digest_size=16).digest()
        if isinstance(salt, AdapterSalt):
            chain = self._root_key(salt.client) + salt.adapter
            return hashlib.blake2b(chain, digest_size=16, person=b"adapter").digest()
        name = salt.encode(errors="surrogatepass")
        return hashlib.blake2b(name, digest_size=16, person=b"root").digest()  # no block's key, whatever the name

    def keys(self, tokens: Sequence[int], salt: Salt = None) -> list[Key]:
        """Return the keys of the full blocks of `tokens` under `salt`."""
        keys, key = [], self._root_key(salt)
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            key = self._hash(key, tokens[start : start + self.block_size])
            keys.append(key)
        return keys

    def match(self, tokens: Sequence[int], keys: Sequence[Key], max_tokens: int, salt: Salt = None) -> PrefixMatch:
        """Return the longest cached prefix of `tokens`, up to `max_tokens` long. `keys` are `keys(tokens, salt)`."""
        entries: list[PrefixEntry] = []
        last = root = self.root(salt)
        for index, key in enumerate(keys[: max_tokens // self.block_size]):
            start = index * self.block_size
            entry = self._entries.get(key)
            if entry is None or entry.parent is not last:
                break
            if entry.tokens != tuple(tokens[start : start + self.block_size]):
                break
            entries.append(entry)
            last = entry
        start = len(entries) * self.block_size
        partial, common = _best_partial_match(last, tokens[start : min(start + self.block_size, max_tokens)])
        return PrefixMatch(root, tuple(entries), partial, common, chain=start)

    # -- filling ------------------------------------------------------------------------------------------------------

    def insert(
        self, parent: PrefixNode, tokens: Sequence[int], blocks: Blocks, key: Key | None = None
    ) -> PrefixEntry | None:
        """Cache a block that follows `parent`, and return its entry. None if these tokens are cached already, or if
        another text has the same key. Fewer tokens than a block's make a partial entry.
        """
        key = key or self._hash(parent.key, tokens)
        if key in self._entries:
            return None
        entry = PrefixEntry(key, parent, tuple(tokens), blocks)
        self._entries[key] = parent.children[key] = entry
        return entry

    def find(self, parent: PrefixNode, tokens: Sequence[int]) -> PrefixEntry | None:
        """Return the entry with exactly these tokens after `parent`; None if there is no such entry."""
        entry = self._entries.get(self._hash(parent.key, tokens))
        return entry if entry is not None and entry.parent is parent and entry.tokens == tuple(tokens) else None

    def get(self, key: Key) -> PrefixEntry | None:
        """Return the entry under a key; None if there is none. It may belong to another text with the same key."""
        return self._entries.get(key)

    def __len__(self) -> int:
        return len(self._entries)

    def remove(self, entry: PrefixEntry) -> None:
        """Remove an entry. The blocks after it can no longer be found, and are evicted in their turn."""
        entry.is_removed = True
        del self._entries[entry.key]
        entry.parent.children.pop(entry.key, None)

    def renumber_blocks(self, new_numbers: Sequence[Mapping[int, int]]) -> None:
        """Give the blocks of each group their new numbers, after they were moved."""
        for entry in self._entries.values():
            pairs = zip(entry.blocks, new_numbers, strict=True)
            entry.blocks = tuple(GONE if block == GONE else new[block] for block, new in pairs)

    def check_invariants(self) -> None:
        """Raise AssertionError if index and tree disagree, or an entry has a wrong key. For tests and debug runs."""
        roots = set(self._roots.values())
        for key, entry in self._entries.items():
            expected_key = self._hash(entry.parent.key, entry.tokens)
            assert entry.key == key == expected_key, "an entry is under a key that is not its own"
            assert entry.parent.children.get(key) is entry, "an entry is not among its parent's successors"
            assert isinstance(entry.parent, PrefixEntry) or entry.parent in roots, "an entry's root is not its salt's"
            assert len(entry.tokens) <= self.block_size, "an entry has more tokens than a block"

    @property
    def states(self) -> list[dict[int, int]]:
        """The snapshots of each entry, by position: how many tokens of the entry's block come before the snapshot."""
        return [entry.states for entry in self._entries.values()]

    @property
    def entries(self) -> tuple[PrefixEntry, ...]:
        """All entries, in the order in which they were inserted."""
        return tuple(self._entries.values())


def predecessor(node: PrefixNode, steps: int) -> PrefixNode:
    """Return the node `steps` blocks before a node."""
    for _ in range(steps):
        assert isinstance(node, PrefixEntry), "a chain is shorter than the blocks that are registered in it"
        node = node.parent
    return node


def _best_partial_match(parent: PrefixNode, rest: Sequence[int]) -> tuple[PrefixEntry | None, int]:
    """Return the entry after `parent` that begins with most tokens of `rest`, the newest of equals, and how many."""
    best_entry, best_length = None, 0
    for index, entry in enumerate(reversed(parent.children.values())):
        if index == _MAX_COMPARED_CHILDREN or best_length == len(rest):
            break
        common = common_prefix_length(entry.tokens, rest)
        if common > best_length:
            best_entry, best_length = entry, common
    return best_entry, best_length


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common beginning of two sequences."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
