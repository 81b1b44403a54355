"""The seam into mlx-lm's unedited models: what goes into the arena is what mlx-lm keeps, layer by layer, and whoever
does not hold one of our handles notices nothing.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import CacheList, RotatingKVCache
from mlx_lm.models.cache import KVCache as PlainCache

from cortexmlx.attention.mlx_lm_hook import LayerCache, group_by_layer, install_attention_hook, make_mlx_lm_caches
from support.engine.core_driver import Driver
from support.models.tiny import CONFIGS, tokens_of


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "deepseek_v2", "gpt2"])
def test_every_layer_stores_what_mlx_lm_keeps_of_it(name: str, tiny: Any, judged: Any) -> None:
    """A layer that wrote to another layer's slab, or at another place, would show here. Prefilled in pieces, then
    decoded past a drain.
    """
    from mlx_lm.models.cache import KVCache

    prompt = tokens_of(30, seed=5)
    driver = Driver(tiny(name), prefill_budget=13, max_rows=2)
    handle = driver.add(prompt, 40)
    driver.step(26)
    job = next(iter(driver.core.requests.answers.values())).job
    stored = job.num_stored_tokens
    assert stored > len(prompt), "a window must have been flushed"
    tokens = job.tokens[:stored]
    model = judged(name)[0]
    caches = [KVCache() for _ in model.layers]
    mx.eval(model(mx.array([tokens]), cache=caches))
    for layer, cache in enumerate(caches):
        arena = driver.core.runner.arena
        group = arena.group_of[layer]
        first = arena.groups[group].spec.attention_window.oldest_visible(
            stored
        )  # what is behind a window is given back
        slots = mx.array(driver.core.cache.tables.slots(job.id, group, first, stored - first))
        for ours, theirs in zip(arena.slab(layer), (cache.keys, cache.values), strict=True):
            if layer and CONFIGS[name].get("sliding_window"):
                continue  # a plain cache sees past the window, so only the first layer's input is the same
            np.testing.assert_allclose(np.array(ours[:, slots]), np.array(theirs[0, :, first:stored]), atol=1e-3)
    handle.cancel()


def test_mlx_lm_itself_is_not_disturbed(tiny: Any, judged: Any) -> None:
    """With the seam in place, mlx-lm's own caches give the same logits as no cache at all."""
    from mlx_lm.models.cache import make_prompt_cache

    install_attention_hook()
    for name in ("llama", "gemma3_text", "gpt_oss"):
        model = judged(name)[0]
        tokens = mx.array([tokens_of(20, seed=2)])
        cache = make_prompt_cache(model)
        pieces = [model(tokens[:, :12], cache=cache), model(tokens[:, 12:], cache=cache)]
        np.testing.assert_allclose(np.array(mx.concatenate(pieces, 1)), np.array(model(tokens)), atol=1e-3)


def test_a_layer_without_keys_of_its_own_gets_the_handle_of_this_step_and_none_of_the_one_before() -> None:
    """A handle of an earlier step would show the tail as it was, and keep its memory."""
    handles: list[object] = []

    def fetch(layer: int, keys: mx.array, values: mx.array) -> object:
        handles.append(object())
        return handles[-1]

    cache = LayerCache(0, fetch)
    for step in range(2):
        cache.begin(step)
        assert cache.offset == step and cache.keys_and_values() == (None, None)
        assert cache.update_and_fetch(mx.zeros(1), mx.zeros(1)) == (handles[step],) * 2
        assert cache.keys_and_values() == (handles[step],) * 2


def test_installing_again_wraps_nothing_twice() -> None:
    from mlx_lm.models import base, llama

    install_attention_hook()
    before = base.scaled_dot_product_attention, llama.scaled_dot_product_attention
    install_attention_hook()
    assert (base.scaled_dot_product_attention, llama.scaled_dot_product_attention) == before


class _TwoCaches(nn.Module):
    """A model whose first layer has two caches, and whose second has one."""

    def make_cache(self) -> list[Any]:
        return [CacheList(PlainCache(), RotatingKVCache(5)), PlainCache()]


def test_a_layer_may_have_several_caches() -> None:
    model = _TwoCaches()
    assert [type(leaf) for leaf in make_mlx_lm_caches(model)] == [PlainCache, RotatingKVCache, PlainCache]
    assert group_by_layer(model, "abc") == [("a", "b"), "c"]
