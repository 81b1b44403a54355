"""What a model keeps is found out before it runs, and one that cannot be paged is refused in plain words."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.kernels
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache as PlainCache

from cortexmlx.attention.probe import NotPaged, build_lazy_logits, probe_kv_specs
from cortexmlx.errors import ModelUnsupported
from cortexmlx.kv.spec import group_layers
from cortexmlx.metal.lab.judge.mlx_lm_kernels import load_simulated
from cortexmlx.metal.lab.sim.kernel import MetalKernel
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


# Models with Metal kernels of their own: refused by name where MLX cannot run them, and paged where it can, which the
# simulator stands for. On a CPU BitNet's layers are float32 instead, and must give what its kernel gives.


BITNET = {"model_type": "bitnet", "num_hidden_layers": 1}
MUSE_SPARK = {
    "model_type": "muse_spark",
    "audio_config": {"out_hidden_size": 32},
    "text_config": CONFIGS["llama"]
    | {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "layer_rope_theta": [10000.0, 0],
        "sliding_window": 9,
        "post_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0},
        "final_logit_softcapping": 9.0,
        "output_multiplier": 0.5,
        "qk_scale_factor": 2.0,
        "moe_hidden_size": 16,
        "moe_intermediate_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 0,
    },
}


def simulate_all(patch: pytest.MonkeyPatch) -> None:
    """Give mlx-lm's modules the simulator's kernels for their own."""
    kernels = [f"mlx_lm.kernels.{found.name}" for found in pkgutil.iter_modules(mlx_lm.kernels.__path__)]
    for name in ("mlx_lm.models.bitlinear_layers", *kernels):
        for attribute, value in vars(load_simulated(name)).items():
            if isinstance(value, MetalKernel):
                patch.setattr(importlib.import_module(name), attribute, value)


both = pytest.mark.parametrize("config", [BITNET, MUSE_SPARK], ids=lambda config: config["model_type"])


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU runs them")
def test_without_a_gpu_they_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"^muse_spark: it has Metal kernels .* needs an Apple GPU$"):
        Driver(write_tiny(tmp_path / "model", "llama", **MUSE_SPARK))


@both
@pytest.mark.slow
def test_where_their_kernels_run_they_are_paged(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx_lm.utils

    folder = write_tiny(tmp_path / "model", "llama", **config)
    if mx.default_device() == mx.cpu:
        simulate_all(monkeypatch)
    model, _ = mlx_lm.utils.load_model(folder)
    prompts = [tokens_of(n, seed=n) for n in (3, 12)]
    for prompt, (answer, mine) in zip(prompts, answers_with_logits(Driver(folder), prompts, 6), strict=True):
        assert np.abs(mine - mlx_lms_logits(model, prompt, answer)).max() < 1e-4, len(prompt)
