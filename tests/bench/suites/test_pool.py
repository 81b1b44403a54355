"""Every way to write keys and values gives back what was written, or there is no figure."""

from __future__ import annotations

import mlx.core as mx
import pytest

from cortexmlx.bench.suites import pool
from cortexmlx.errors import CortexError

SMALL = pool.PoolSizes(layers=2, rows=3, heads=2, dim=4, tokens=37, block=8)


def test_all_ways_are_measured_and_the_pool_takes_no_memory_on_the_way() -> None:
    found = pool.measure_writers(SMALL, 2, lambda what: None)
    assert [w.name for w in found] == list(pool.WRITERS)
    assert all(len(w.rates) == 2 and min(w.rates) > 0 for w in found)
    grown = {w.name: w.bytes_added for w in found}
    written = 2 * 2 * 3 * 2 * 4 * 37 * 2  # keys and values, layers, rows, heads, dim, tokens, bytes
    assert grown[pool.POOL] == 0 and grown[pool.NAIVE] >= written


@pytest.mark.parametrize("name", list(pool.WRITERS))
def test_a_token_that_is_lost_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = pool.WRITERS[name]
    append = kind.append  # type: ignore[attr-defined]

    def wrong(self: pool.KVWriter, place: int, keys: mx.array, values: mx.array) -> None:
        append(self, place, keys, values + 1 if place == 20 else values)

    monkeypatch.setattr(kind, "append", wrong)
    with pytest.raises(CortexError, match="does not give back"):
        pool.measure_writers(SMALL, 1, lambda what: None, [name])
