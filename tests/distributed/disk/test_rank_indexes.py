"""A piece is there if all ranks have told that they have their part."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.distributed.disk.group_store import RankIndexes
from cortexmlx.distributed.wire.messages import part_key

PIECES = [bytes([n]) * 16 for n in range(4)]
CHANGES = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.sets(st.sampled_from(PIECES))), max_size=12)


@given(st.integers(1, 3), CHANGES)
def test_the_intersection_is_that_of_what_was_told(ranks: int, changes: list[tuple[int, bool, set[bytes]]]) -> None:
    indexes, parts = RankIndexes(ranks), [set[bytes]() for _ in range(ranks)]
    for number, added, keys in changes:
        rank = number % ranks
        own = [part_key(key, rank) for key in keys]
        indexes.change(rank, own if added else (), () if added else own)
        parts[rank] = parts[rank] | keys if added else parts[rank] - keys
    everywhere = set.intersection(*parts)
    assert {piece for piece in PIECES if piece in indexes} == everywhere and len(indexes) == len(everywhere)
