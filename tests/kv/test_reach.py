"""How far back a query sees, against the definitions, position by position."""

from __future__ import annotations

import numpy as np
import pytest

from cortexmlx.kv.reach import Reach
from cortexmlx.kv.spec import KVSpec


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 100])
def test_a_window_is_the_newest_tokens_and_a_chunk_those_since_its_beginning(tokens: int, kind: type) -> None:
    window, chunk, everything = Reach(tokens), Reach(tokens, chunked=True), Reach()
    position = np.arange(40, dtype=kind)
    for p in range(40):
        seen = [t for t in range(p + 1) if p - t < tokens]
        together = [t for t in range(p + 1) if t // tokens == p // tokens]
        assert (window.oldest(p), chunk.oldest(p), everything.oldest(p)) == (seen[0], together[0], 0)
        assert len(seen) == min(p + 1, tokens) and len(together) <= tokens
    for reach in (window, chunk, everything):
        oldest = reach.oldest(position)
        assert oldest.dtype == kind and oldest.tolist() == [reach.oldest(p) for p in range(40)]


def test_a_number_of_positions_is_a_number() -> None:
    assert {type(r.oldest(7)) for r in (Reach(), Reach(3), Reach(30), Reach(4, chunked=True))} == {int}


def test_layers_that_keep_as_much_but_see_otherwise_are_of_two_kinds() -> None:
    sliding, chunked = KVSpec(1, 8, 8, "float32", 16), KVSpec(1, 8, 8, "float32", 16, chunked=True)
    assert sliding != chunked and (sliding.reach, chunked.reach) == (Reach(16), Reach(16, chunked=True))
    assert KVSpec(1, 8, 8, "float32").reach == Reach()
