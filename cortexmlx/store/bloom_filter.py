"""A Bloom filter of the store's keys, so that a new prompt does not wait for the index."""

from __future__ import annotations

from collections.abc import Iterable

_BITS = 24
"""2**24 bits are 2 MiB: with a million keys, one of 400 others is taken for known."""


class BloomFilter:
    """Keys are hashes already: four numbers of a key are its places. Any thread may use it."""

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self._bits = bytearray(1 << (_BITS - 3))
        self.add(keys)

    def add(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            for place in _places(key):
                self._bits[place >> 3] |= 1 << (place & 7)

    def __contains__(self, key: bytes) -> bool:
        """False: it was never added."""
        return all(self._bits[place >> 3] >> (place & 7) & 1 for place in _places(key))


def _places(key: bytes) -> list[int]:
    return [int.from_bytes(key[i : i + 4], "little") & ((1 << _BITS) - 1) for i in (0, 4, 8, 12)]
