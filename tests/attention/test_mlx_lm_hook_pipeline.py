"""A cache has a place for what was sent if its part of a model sends, and nothing of it otherwise."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.attention import probe
from cortexmlx.attention.mlx_lm_hook import LayerCache, group_by_layer, take_pending_sends
from cortexmlx.attention.recurrent import RecurrentCache
from cortexmlx.mlx_lm.package import enter_mlx_lm, import_mlx_lm_utils
from cortexmlx.models.sharding import StandInGroup
from tests.architectures.configurations import configuration


def part(rank: int) -> Any:
    """A rank's part of a pipeline of two, each with a recurrent layer and one that attends."""
    enter_mlx_lm()
    model_class, args_class = import_mlx_lm_utils()._get_classes(configuration("qwen3_5"))
    model = model_class(args_class.from_dict(configuration("qwen3_5")))
    model.language_model.model.pipeline(StandInGroup(rank, 2))
    return model


def leaves_of(model: Any) -> list[Any]:
    leaves = [
        RecurrentCache(2) if layer.is_linear else LayerCache(i, lambda *_: None) for i, layer in enumerate(model.layers)
    ]
    assert group_by_layer(model, leaves) == leaves
    return leaves


def test_a_cache_has_no_keys_unless_its_part_sends() -> None:
    leaves = leaves_of(part(0))
    for leaf in leaves:
        assert not hasattr(leaf, "keys")
        with pytest.raises(AttributeError):
            leaf.keys = mx.zeros(1)
    assert take_pending_sends(leaves) == []


def test_what_was_sent_is_taken_once() -> None:
    leaves = leaves_of(part(1))
    sending = mx.array([1.0])
    for leaf in leaves:
        leaf.keys = mx.depends(leaf.keys, sending)
    taken = take_pending_sends(leaves)
    assert len(taken) == len(leaves) > 0
    mx.eval(taken)
    assert take_pending_sends(leaves) == []


def test_a_leaf_that_only_sends_is_unused() -> None:
    """A rank whose last leaf sends and keeps nothing was refused as one that cannot be paged."""
    leaf = probe._ProbeCache(0, 2, lambda *_: None)
    leaf.sends = True
    assert leaf.is_unused
    leaf.keys = mx.zeros(1)
    assert leaf.pending_send is not None and leaf.is_unused
