"""What a model keeps is found out before it runs, and one that cannot be paged is refused in plain words."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache as PlainCache

from cortexmlx.attention.probe import NotPaged, build_lazy_logits, probe_kv_specs
from cortexmlx.errors import ModelUnsupported
from cortexmlx.kv.spec import group_layers
from support.engine.core_driver import Driver
from support.engine.logits import answers_with_logits, mlx_lms_logits
from support.models.tiny import CONFIGS, VOCAB, tokens_of, write_tiny

PHI3SMALL = {
    "model_type": "phi3small",
    "dense_attention_every_n_layers": 1,
    "ff_intermediate_size": 48,
    "gegelu_limit": 1.0,
    "layer_norm_epsilon": 1e-5,
}


def test_layers_of_one_kind_share_their_tables(tiny: Any) -> None:
    from cortexmlx.models import load_model

    groups = group_layers(probe_kv_specs(load_model(tiny("windowed llama")).model))
    assert [(g.spec.window, g.layers) for g in groups] == [(11, (0, 2)), (None, (1,))]
    assert group_layers(probe_kv_specs(load_model(tiny("deepseek_v2")).model))[0].spec.key_dim == 12
    assert group_layers(probe_kv_specs(load_model(tiny("deepseek_v2")).model))[0].spec.value_dim == 6


def test_a_lazy_pass_says_when_each_layer_attends(judged: Any) -> None:
    model = judged("windowed llama")[0]
    probe_kv_specs(model)
    calls: list[int] = []
    logits = build_lazy_logits(model, mx.zeros((5, 1), mx.int32), lambda: calls.append(1))
    assert logits.shape == (5, 1, VOCAB) and len(calls) == len(model.layers)
    reusing = judged("afm7")[0]
    probe_kv_specs(reusing)
    calls.clear()
    build_lazy_logits(reusing, mx.zeros((5, 1), mx.int32), lambda: calls.append(1))
    assert len(calls) == 4, "two layers have keys and values, two attend to them"


NEMOTRON_NAS = {
    "model_type": "nemotron-nas",
    "num_hidden_layers": 4,
    "block_configs": [
        {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
    ],
}


def test_a_layer_whose_cache_is_left_alone_keeps_nothing(tmp_path: Any) -> None:
    """A product in the place of attention has a cache in mlx-lm all the same."""
    import mlx_lm

    folder = write_tiny(tmp_path / "model", "llama", **NEMOTRON_NAS)
    model = mlx_lm.load(str(folder))[0]
    assert [spec.kv_heads for spec in probe_kv_specs(model)] == [2, 0, 1]
    prompts = [tokens_of(n, seed=n) for n in (5, 21)]
    for prompt, (answer, mine) in zip(prompts, answers_with_logits(Driver(folder), prompts, 20), strict=True):
        assert np.abs(mine - mlx_lms_logits(model, prompt, answer)).max() < 1e-4, len(prompt)


class _Keeps(nn.Module):
    """A model that keeps something of its own making in its cache."""

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        cache[0].seen = tokens
        return mx.zeros((*tokens.shape, VOCAB))

    def make_cache(self) -> list[Any]:
        return [PlainCache()]


def test_a_cache_in_which_a_model_puts_something_of_its_own_is_not_left_alone() -> None:
    with pytest.raises(ModelUnsupported, match=r"layers \[0\] attend in a way that cannot be paged"):
        probe_kv_specs(_Keeps())


class _Own(nn.Module):
    """A model that attends by itself."""

    model_type = "own"

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        x = mx.zeros((tokens.shape[0], 1, 1, 4))
        keys, values = cache[0].update_and_fetch(x, x)
        scores: mx.array = x @ keys.swapaxes(-1, -2)
        return scores @ values

    def make_cache(self) -> list[Any]:
        return [PlainCache()]


def test_a_model_that_cannot_be_paged_is_told_apart_in_plain_words() -> None:
    with pytest.raises(NotPaged, match="own: its layers compute with keys and values themselves") as told:
        probe_kv_specs(_Own())
    assert in_plain_words(told.value)


def test_a_model_whose_prompts_see_what_comes_later_is_refused_by_name() -> None:
    """mlx-lm's own logits of a prompt's third token change with its sixth."""
    from mlx_lm.models import phi3small

    model = phi3small.Model(phi3small.ModelArgs.from_dict(CONFIGS["llama"] | PHI3SMALL))
    model._dummy_tokenizer_ids = mx.array([0])
    one, other = (np.array(model(mx.array([[5, 6, 7, 8, 9, last]]))[0, 2, 1:]) for last in (10, 11))
    assert np.abs(one - other).max() > 1e-4
    with pytest.raises(ModelUnsupported, match="phi3small: mlx-lm's code for it adds its causal mask") as refused:
        probe_kv_specs(model)
    assert not isinstance(refused.value, NotPaged) and in_plain_words(refused.value)


def test_a_model_whose_prompts_see_what_is_not_kept_is_refused_and_never_answers_wrongly(tmp_path: Any) -> None:
    """Its answers would depend on how its prompts are cut, on mlx-lm's own caches, too."""
    model = written(tmp_path, "llama", model_type="plamo3", sliding_window=8, sliding_window_pattern=2)
    with pytest.raises(ModelUnsupported, match="see 9 tokens, but only 8") as refused:
        probe_kv_specs(model)
    assert not isinstance(refused.value, NotPaged) and in_plain_words(refused.value)


def written(folder: Any, name: str, **changes: Any) -> Any:
    """A tiny model that was written and loaded."""
    from cortexmlx.models import load_model

    return load_model(write_tiny(folder / "model", name, **changes)).model


def in_plain_words(error: Exception) -> bool:
    """Python's words are for the log."""
    return not re.search("Error|object|attribute|argument", str(error))


@pytest.mark.parametrize("window", [0, -1, True, "64", 1.5, 10**30, [9]])
def test_a_window_that_is_none_is_refused_with_what_config_json_says(tmp_path: Any, window: Any) -> None:
    folder = write_tiny(tmp_path / "m", "windowed llama", sliding_window=window)
    with pytest.raises(
        ModelUnsupported, match=f"llama: config.json gives layers a window of {re.escape(repr(window))}"
    ):
        Driver(folder)
