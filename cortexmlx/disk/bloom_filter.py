"""A Bloom filter of the store's keys, so that a new prompt does not wait for the index."""

from __future__ import annotations

from collections.abc import Iterable

_BITS = 24
"""2**24 bits are 2 MiB. With a million keys, the filter takes one of 400 unknown keys for a known one."""


class BloomFilter:
    """A set of keys that may take an unknown key for a known one. Keys are hashes already, so four parts of a key are
    its bit positions. Any thread may use it.
    """

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self._bits = bytearray(1 << (_BITS - 3))
        self.add(keys)

    def add(self, keys: Iterable[bytes]) -> None:
        """Add keys."""
        for key in keys:
            for place in _places(key):
                self._bits[place >> 3] |= 1 << (place & 7)

    def __contains__(self, key: bytes) -> bool:
        """Return whether a key may have been added. False is certain."""
        return all(self._bits[place >> 3] >> (place & 7) & 1 for place in _places(key))


def _places(key: bytes) -> list[int]:
    return [int.from_bytes(key[i : i + 4], "little") & ((1 << _BITS) - 1) for i in (0, 4, 8, 12)]
