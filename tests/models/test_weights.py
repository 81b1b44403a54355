"""Making weights float32 keeps every value, for every kind of packed layer; counts agree with mlx-lm's."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama, qwen3_moe
from mlx_lm.utils import dequantize_model, get_total_parameters

from cortexmlx.models.weights import (
    activations_to_float32,
    is_quantized,
    parameter_count,
    to_float32,
    weight_bytes,
)

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def dense() -> Any:
    return llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=64,
            tie_word_embeddings=False,
            attention_bias=True,
        )
    )


def experts() -> Any:
    return qwen3_moe.Model(
        qwen3_moe.ModelArgs(
            model_type="qwen3_moe",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=96,
            num_attention_heads=4,
            num_experts=4,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            moe_intermediate_size=32,
            rms_norm_eps=1e-5,
            vocab_size=64,
            num_key_value_heads=2,
            head_dim=16,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            max_position_embeddings=128,
            norm_topk_prob=True,
        )
    )


def logits(model: Any) -> np.ndarray:
    return np.array(model(mx.array([TOKENS])).astype(mx.float32))


@pytest.mark.parametrize("build", [dense, experts])
@pytest.mark.parametrize(("mode", "bits"), [("affine", 4), ("affine", 8), ("mxfp4", 4)])
def test_expanded_weights_are_those_that_the_packed_ones_stand_for(build: Any, mode: str, bits: int) -> None:
    mx.random.seed(1)
    model = build()
    nn.quantize(model, group_size=32, bits=bits, mode=mode)
    mx.eval(model.parameters())
    wanted, packed, parameters = logits(model), weight_bytes(model), get_total_parameters(model)
    assert is_quantized(model) and parameter_count(model) == parameters
    to_float32(model)
    assert not is_quantized(model) and parameter_count(model) == parameters
    assert weight_bytes(model) == 4 * parameters > packed
    assert np.abs(logits(model) - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_half_precision_scales_are_widened_before_they_are_used() -> None:
    """mlx-lm's own expansion rounds each weight to float16; the values here are those of exact arithmetic."""
    mx.random.seed(2)
    ours, theirs = dense(), dense()
    theirs.update(ours.parameters())
    for model in (ours, theirs):
        model.set_dtype(mx.float16)
        nn.quantize(model, group_size=32, bits=4)
    layer = ours.model.layers[0].mlp.up_proj
    codes = np.unpackbits(np.array(layer.weight).view(np.uint8), bitorder="little").reshape(96, 64, 4)
    values = (codes * [1, 2, 4, 8]).sum(-1).reshape(96, 2, 32).astype(np.float64)
    exact = values * np.array(layer.scales, np.float64)[..., None] + np.array(layer.biases, np.float64)[..., None]
    to_float32(ours)
    dequantize_model(theirs)

    def error(model: Any) -> float:
        found = np.array(model.model.layers[0].mlp.up_proj.weight.astype(mx.float32), np.float64)
        return float(np.abs(found - exact.reshape(96, 64)).max())

    assert error(ours) < 1e-7 < error(theirs)


def test_only_activations_widen_when_weights_stay_packed() -> None:
    model = dense()
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4)
    before = np.array(model.model.layers[0].mlp.up_proj.weight)
    activations_to_float32(model)
    assert is_quantized(model) and model(mx.array([TOKENS])).dtype == mx.float32
    assert np.array_equal(np.array(model.model.layers[0].mlp.up_proj.weight), before)
