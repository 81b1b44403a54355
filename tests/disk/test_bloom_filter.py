"""Which keys there may be: none that is there is missed, and few that are not are taken for known."""

from __future__ import annotations

from cortexmlx.disk.segment_store import BloomFilter
from support.store.records import key_of


def test_what_was_added_is_known_and_almost_nothing_else() -> None:
    known = BloomFilter(key_of(n) for n in range(20_000))
    known.add([key_of(-1)])
    assert all(key_of(n) in known for n in range(-1, 20_000))
    assert sum(key_of(n) in known for n in range(20_000, 40_000)) < 20
