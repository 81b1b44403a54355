"""How far back a query sees, against the definitions, position by position."""

from __future__ import annotations

import numpy as np
import pytest

from cortexmlx.kv.spec import AttentionWindow, KVSpec


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 100])
def test_a_window_is_the_newest_tokens_and_a_chunk_those_since_its_beginning(tokens: int, kind: type) -> None:
    window, chunk, everything = AttentionWindow(tokens), AttentionWindow(tokens, chunked=True), AttentionWindow()
    position = np.arange(40, dtype=kind)
    for p in range(40):
        seen = [t for t in range(p + 1) if p - t < tokens]
        together = [t for t in range(p + 1) if t // tokens == p // tokens]
        assert (window.oldest_visible(p), chunk.oldest_visible(p), everything.oldest_visible(p)) == (
            seen[0],
            together[0],
            0,
        )
        assert len(seen) == min(p + 1, tokens) and len(together) <= tokens
    for attention_window in (window, chunk, everything):
        oldest = attention_window.oldest_visible(position)
        assert oldest.dtype == kind and oldest.tolist() == [attention_window.oldest_visible(p) for p in range(40)]


def test_a_number_of_positions_is_a_number() -> None:
    assert {
        type(r.oldest_visible(7))
        for r in (AttentionWindow(), AttentionWindow(3), AttentionWindow(30), AttentionWindow(4, chunked=True))
    } == {int}


def test_layers_that_keep_as_much_but_see_otherwise_are_of_two_kinds() -> None:
    sliding, chunked = KVSpec(1, 8, 8, "float32", 16), KVSpec(1, 8, 8, "float32", 16, chunked=True)
    assert sliding != chunked and (sliding.attention_window, chunked.attention_window) == (
        AttentionWindow(16),
        AttentionWindow(16, chunked=True),
    )
    assert KVSpec(1, 8, 8, "float32").attention_window == AttentionWindow()
