"""A cache has a place for what was sent if its part of a model sends, and nothing of it otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.attention.mlx_lm_hook import LayerCache
from cortexmlx.attention.pipeline import let_send, take_sent
from cortexmlx.attention.state.dispatch import StateLeaf


def part(rank: int) -> Any:
    return SimpleNamespace(
        named_modules=lambda: [("", SimpleNamespace()), ("model", SimpleNamespace(pipeline_rank=rank))]
    )


def caches() -> list[Any]:
    return [LayerCache(0, lambda *_: None), StateLeaf(2), object()]


def test_a_cache_has_no_keys_unless_its_part_sends() -> None:
    leaves = caches()
    let_send(part(0), leaves)
    for leaf in leaves[:2]:
        assert not hasattr(leaf, "keys")
        with pytest.raises(AttributeError):
            leaf.keys = mx.zeros(1)
    assert take_sent(leaves) == []


def test_what_was_sent_is_taken_once() -> None:
    leaves = caches()
    let_send(part(1), leaves)
    calls = []
    sending = mx.array([1.0])
    for leaf in leaves[:2]:
        leaf.keys = mx.depends(leaf.keys, sending)
        calls.append(leaf.sent)
    taken = take_sent(leaves)
    assert [id(a) for a in taken] == [id(a) for a in calls] and len(taken) == 2
    mx.eval(taken)
    assert take_sent(leaves) == []
