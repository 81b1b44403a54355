"""What recurrent layers keep, and which classes touch it, is found out and not looked up."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from cortexmlx.attention.probe import probe_kv_specs
from cortexmlx.attention.recurrent import RecurrentProbe
from cortexmlx.errors import ModelUnsupported
from support.models.recurrent import RECURRENT

TOUCHING = {
    "qwen3_next": {"Qwen3NextGatedDeltaNet"},
    "rwkv7": {"Rwkv7TimeMixing", "Rwkv7ChannelMixing"},
    "falcon_h1": {"FalconH1Mixer"},
    "recurrent_gemma": {"RecurrentBlock"},
}


@pytest.mark.parametrize("name", TOUCHING)
def test_the_classes_that_touch_a_state_are_called_in_parts(name: str, judged: Any) -> None:
    model = judged(name)[0]
    probe_kv_specs(model)
    own = {type(m) for m in model.modules() if type(m).__module__ == type(model).__module__}
    replaced = {owner.__name__ for owner in own if hasattr(owner.__dict__.get("__call__"), "replaced")}
    assert replaced == TOUCHING[name]


FIXED = [name for name in RECURRENT if name != "longcat_flash_ngram"]
"""That one keeps its last tokens, and has fewer at the beginning."""


@pytest.mark.parametrize(
    "name", [n if n in TOUCHING and n != "rwkv7" else pytest.param(n, marks=pytest.mark.slow) for n in FIXED]
)
def test_a_state_takes_the_bytes_of_mlx_lms_own(name: str, judged: Any) -> None:
    """And what is not a state is keys and values."""
    model = judged(name)[0]
    specs = probe_kv_specs(model)
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3, 4, 5]]), cache=caches))
    leaves = [leaf for cache in caches for leaf in getattr(cache, "caches", [cache])]
    for spec, leaf in zip(specs, leaves, strict=True):
        if type(leaf) is ArraysCache:
            assert (spec.kv_heads, spec.bytes_per_token, spec.row_bytes) == (0, 0, leaf.nbytes)
        else:
            assert spec.kv_heads and not spec.row_bytes


class Both(nn.Module):  # type: ignore[misc]
    """Keeps a state beside keys and values, in one module."""

    def __call__(self, x: mx.array, state: Any, attend: Any) -> None:
        state[0] = x
        attend()


def test_a_class_that_attends_with_a_state_is_refused() -> None:
    model = Both()
    recurrent = RecurrentProbe(model, [ArraysCache(1), KVCache()])
    with recurrent.watch_touches():
        model(mx.zeros((2, 1)), recurrent.insert_observed([None, None])[0], recurrent.record_attention)
    with pytest.raises(ModelUnsupported, match="Both keeps a state and attends"):
        recurrent.install_hooks()
    assert recurrent.leaves == [0] and recurrent.state_spec(0, 2).row_bytes == 4


def test_a_state_of_which_nothing_is_left_is_refused() -> None:
    recurrent = RecurrentProbe(nn.Module(), [ArraysCache(1)])
    with pytest.raises(ModelUnsupported, match="nothing was left in the state of layer 0"):
        recurrent.state_spec(0, 2)
