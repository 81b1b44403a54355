"""The prefix cache: which blocks hold which tokens, so that a prompt that begins like an earlier one need not be
computed again.

A full block is keyed by a hash chain: the key of the block before it, and its own tokens; so equal keys mean equal
text from the very beginning. A key is never trusted alone: a hit must also have the right tokens and the right
predecessor.

Every chain begins at a root, and each *salt* has a root of its own. So what is stored under one salt is found by
nobody with another: not whole, not in part, and not by how long it takes. The model is not in the keys: a cache is one
engine's. The tier below, which others share, adds it.

An entry names a block in every layer group. Those of windows may be evicted alone (`GONE`): who begins behind them
does not need them, so the entry stays a link of its chain. Who owns which block, and which go first, is known to the
`BlockPools`. Everything is O(1) per block. No mlx.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import numpy as np

Key = bytes
Blocks = tuple[int, ...]
"""The block of each layer group that holds the same tokens."""

GONE = -1
"""In the place of a block that is no longer cached, or was never."""

_CHILDREN_LOOKED_AT = 16
"""How many successors of a block are compared for a partial match: bounds the work, and the newest are the likeliest.
"""


@dataclass(eq=False)
class Node:
    """A place in a chain, and the cached blocks that follow it. One that is no `Entry` is a root: no block is before
    it.
    """

    key: Key
    children: OrderedDict[Key, Entry] = field(default_factory=OrderedDict, kw_only=True)


@dataclass(eq=False)
class Entry(Node):
    """One cached block in all layer groups. `tokens` is the block's content so far; fewer than a block's worth is a
    partial block. `states` are snapshots of recurrent states, by how many of the tokens they come after, and `below`
    says which pieces of it the tier below has. A sequence may still go on from an entry that is `forgotten`.
    """

    parent: Node
    tokens: tuple[int, ...]
    blocks: Blocks
    states: dict[int, int] = field(default_factory=dict, kw_only=True)
    below: frozenset[int] = field(default=frozenset(), kw_only=True)
    forgotten: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Match:
    """What of a prompt is cached: after `root`, `entries`, full blocks in order, then `partial_tokens` tokens at the
    beginning of `partial`'s block. Where that takes a recurrent state, it ends at `snapshot`, though the first
    `chain` tokens are cached.
    """

    root: Node
    entries: tuple[Entry, ...]
    partial: Entry | None
    partial_tokens: int
    snapshot: int | None = None
    chain: int = 0

    def tokens(self, block_size: int) -> int:
        """How many tokens it has."""
        return len(self.entries) * block_size + self.partial_tokens

    def block(self, place: int) -> Entry:
        """The entry of the block at a place; the partial one comes last."""
        entry = self.entries[place] if place < len(self.entries) else self.partial
        assert entry is not None
        return entry

    @property
    def last(self) -> Node:
        """What the first block that is not cached follows."""
        return self.entries[-1] if self.entries else self.root


def chain_hash(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of a block: a hash over the key of the block before it and its tokens."""
    return hashlib.blake2b(parent + np.asarray(tokens, np.int32).tobytes(), digest_size=16).digest()


class PrefixCache:
    """Entries by key. `hashing` is for tests."""

    def __init__(self, block_size: int, hashing: Callable[[Key, Sequence[int]], Key] = chain_hash) -> None:
        self.block_size = block_size
        self._hash = hashing
        self._entries: dict[Key, Entry] = {}
        self._roots: WeakValueDictionary[str | None, Node] = WeakValueDictionary()

    # -- looking up ---------------------------------------------------------------------------------------------------

    def root(self, salt: str | None = None) -> Node:
        """Where the texts of a salt begin. It lives as long as a cached block or a sequence comes after it."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(self._root_key(salt))
        return root

    def _root_key(self, salt: str | None) -> Key:
        if salt is None:
            return hashlib.blake2b(digest_size=16).digest()
        name = salt.encode(errors="surrogatepass")
        return hashlib.blake2b(name, digest_size=16, person=b"root").digest()  # no block's key, whatever the name

    def keys(self, tokens: Sequence[int], salt: str | None = None) -> list[Key]:
        """The keys of the full blocks of `tokens`, which are shared under `salt`."""
        keys, key = [], self._root_key(salt)
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            key = self._hash(key, tokens[start : start + self.block_size])
            keys.append(key)
        return keys

    def match(self, tokens: Sequence[int], keys: Sequence[Key], max_tokens: int, salt: str | None = None) -> Match:
        """The longest beginning of `tokens` that is cached under `salt`, at most `max_tokens` of them. `keys` are those
        of the same tokens and salt.
        """
        entries: list[Entry] = []
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
        partial, common = _best_child(last, tokens[start : min(start + self.block_size, max_tokens)])
        return Match(root, tuple(entries), partial, common, chain=start)

    # -- filling ------------------------------------------------------------------------------------------------------

    def insert(self, parent: Node, tokens: Sequence[int], blocks: Blocks, key: Key | None = None) -> Entry | None:
        """Cache a block that follows `parent`. Returns its entry; None if those tokens are cached already, or their
        key is taken. Fewer tokens than a block make a partial entry.
        """
        key = key or self._hash(parent.key, tokens)
        if key in self._entries:
            return None
        entry = Entry(key, parent, tuple(tokens), blocks)
        self._entries[key] = parent.children[key] = entry
        return entry

    def find(self, parent: Node, tokens: Sequence[int]) -> Entry | None:
        """The entry with just these tokens after `parent`."""
        entry = self._entries.get(self._hash(parent.key, tokens))
        return entry if entry is not None and entry.parent is parent and entry.tokens == tuple(tokens) else None

    def get(self, key: Key) -> Entry | None:
        """The entry under a key, which may be another's with the same key."""
        return self._entries.get(key)

    def __len__(self) -> int:
        return len(self._entries)

    def remove(self, entry: Entry) -> None:
        """Forget an entry. Its successors can no longer be reached and go when their turn comes."""
        entry.forgotten = True
        del self._entries[entry.key]
        entry.parent.children.pop(entry.key, None)

    def move(self, new_numbers: Sequence[Mapping[int, int]]) -> None:
        """The blocks of each group have new numbers."""
        for entry in self._entries.values():
            pairs = zip(entry.blocks, new_numbers, strict=True)
            entry.blocks = tuple(GONE if block == GONE else new[block] for block, new in pairs)

    def check_invariants(self) -> None:
        """Raise AssertionError if the ways to an entry disagree, or a key does not belong to its tokens: for tests and
        debug runs.
        """
        roots = set(self._roots.values())
        for key, entry in self._entries.items():
            right = self._hash(entry.parent.key, entry.tokens)
            assert entry.key == key == right, "an entry is under a key that is not its own"
            assert entry.parent.children.get(key) is entry, "an entry is not among its parent's successors"
            assert isinstance(entry.parent, Entry) or entry.parent in roots, "an entry's root is not its salt's"
            assert len(entry.tokens) <= self.block_size, "an entry has more tokens than a block"

    @property
    def states(self) -> list[dict[int, int]]:
        """The snapshots of all entries."""
        return [entry.states for entry in self._entries.values()]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All of them, those first that were inserted first."""
        return tuple(self._entries.values())


def predecessor(node: Node, steps: int) -> Node:
    """Return the node `steps` blocks before a node in its chain."""
    for _ in range(steps):
        assert isinstance(node, Entry), "a chain is shorter than the blocks that are registered in it"
        node = node.parent
    return node


def _best_child(parent: Node, rest: Sequence[int]) -> tuple[Entry | None, int]:
    """The newest of a node's successors that has most of `rest` in common, and how many tokens that is."""
    best, longest = None, 0
    for index, entry in enumerate(reversed(parent.children.values())):
        if index == _CHILDREN_LOOKED_AT or longest == len(rest):
            break
        common = common_length(entry.tokens, rest)
        if common > longest:
            best, longest = entry, common
    return best, longest


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
