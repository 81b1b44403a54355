"""Making weights float32 keeps every value, for every kind of packed layer; counts agree with mlx-lm's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import deepseek_v3, llama, qwen3_moe
from mlx_lm.models.bitlinear_layers import bitnet_quantize
from mlx_lm.utils import dequantize_model, get_total_parameters

from cortexmlx.models import LoadedModel, load_model
from cortexmlx.models.weights import (
    convert_activations_to_float32,
    convert_to_float32,
    find_unsupported_on_cpu,
    is_quantized,
    parameter_count,
    release_arrays,
    weight_bytes,
)
from cortexmlx.models.weights_hash import WeightsHash, hash_arrays
from support.folders import CONFIG
from support.models.adapters import write_adapter

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


SIZES = CONFIG | {"vocab_size": 64, "tie_word_embeddings": False}


def dense() -> Any:
    return llama.Model(llama.ModelArgs.from_dict(SIZES | {"attention_bias": True}))


def experts() -> Any:
    more = {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "norm_topk_prob": True,
    }
    return qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(SIZES | more))


def latents() -> Any:
    """Each head's matrices from latents and to latents are layers of their own kind."""
    ranks = dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"), 32)
    more = {"num_hidden_layers": 1, "num_key_value_heads": 4, "qk_rope_head_dim": 8, "first_k_dense_replace": 1}
    return deepseek_v3.Model(deepseek_v3.ModelArgs.from_dict(SIZES | ranks | more))


def logits(model: Any) -> np.ndarray:
    return np.array(model(mx.array([TOKENS])).astype(mx.float32))


@pytest.mark.parametrize("build", [dense, experts, latents])
@pytest.mark.parametrize(("mode", "bits"), [("affine", 4), ("affine", 8), ("mxfp4", 4)])
def test_expanded_weights_are_those_that_the_packed_ones_stand_for(build: Any, mode: str, bits: int) -> None:
    mx.random.seed(1)
    model = build()
    nn.quantize(model, group_size=32, bits=bits, mode=mode)
    mx.eval(model.parameters())
    wanted, packed, parameters = logits(model), weight_bytes(model), get_total_parameters(model)
    assert is_quantized(model) and parameter_count(model) == parameters
    convert_to_float32(model)
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
    convert_to_float32(ours)
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
    convert_activations_to_float32(model)
    assert is_quantized(model) and model(mx.array([TOKENS])).dtype == mx.float32
    assert np.array_equal(np.array(model.model.layers[0].mlp.up_proj.weight), before)


def test_experts_with_a_scale_of_their_own_are_expanded_by_the_format() -> None:
    """nvfp4: codes of floats with 2 exponent and 1 mantissa bits, a float of 4 and 3 bits for 16 of them, and for an
    expert the largest number of all, which the largest code times the largest of these stands for.
    """
    mx.random.seed(4)
    model = experts()
    layer = model.layers[0].mlp.switch_mlp.up_proj.to_quantized(16, 4, "nvfp4", global_scale=True)
    model.layers[0].mlp.switch_mlp.up_proj = layer
    assert find_unsupported_on_cpu(model) is not None
    packed = np.array(layer.weight).view(np.uint8)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(4, 32, 64)
    floats = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    signed = np.concatenate([floats, -floats])[codes]
    stored = np.array(layer.scales)
    exponent, mantissa = (stored >> 3 & 15).astype(int), stored & 7
    scales = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    whole = np.array(layer.global_scale, np.float64)[:, None, None] / (6 * 448)
    convert_to_float32(model)
    found = np.array(model.layers[0].mlp.switch_mlp.up_proj.weight, np.float64)
    assert np.abs(found - signed * scales.repeat(16, -1) * whole).max() < 1e-6 * np.abs(found).max()
    assert find_unsupported_on_cpu(model) is None


@pytest.mark.parametrize("method", ["bitnet", "autobitlinear"])
def test_ternary_layers_are_expanded_by_the_format(method: str) -> None:
    """A row's code is in the byte of the row that many quarters before it."""
    model = dense()
    bitnet_quantize(model, {"linear_class": method, "modules_to_not_convert": ["lm_head"]})
    layer, rng = model.layers[1].mlp.down_proj, np.random.default_rng(5)
    values = rng.integers(-1, 2, (64, 96))
    quarters = (values + 1).astype(np.uint8).reshape(4, 16, 96)
    layer.weight = mx.array(quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6)
    layer.weight_scale = mx.array([2.5], mx.bfloat16)
    assert is_quantized(model) and find_unsupported_on_cpu(model) is not None
    parameters = parameter_count(model)
    convert_to_float32(model)
    assert np.array_equal(
        np.array(model.layers[1].mlp.down_proj.weight),
        (values * (2.5 if method == "autobitlinear" else 1 / 2.5)).astype(np.float32),
    )
    assert parameter_count(model) == parameters == parameter_count(dense()) and not is_quantized(model)
    assert logits(model).shape == (1, 8, 64)


def test_releasing_a_model_leaves_others_of_its_kind_as_they_are() -> None:
    """mlx-lm's models of experts share their activation, which is the default of an argument."""
    released, other = experts(), experts()
    assert released.layers[0].mlp.switch_mlp.activation is other.layers[0].mlp.switch_mlp.activation
    before = np.array(other(mx.array([TOKENS])))
    release_arrays(released)
    assert not tree_flatten(released.parameters())
    other.freeze()
    other.eval()
    other.set_dtype(mx.float32)
    assert not tree_flatten(other.trainable_parameters()) and np.array_equal(
        np.array(other(mx.array([TOKENS]))), before
    )


# -- The hash of a model's weights: of its files, as long as memory holds what they say -------------------------------


def hashed(
    folder: Path, change: Callable[[Any], object] = lambda model: None, **options: Any
) -> tuple[LoadedModel, str | None]:
    """A model that is loaded, changed and checked, and its hash."""
    weights = WeightsHash(lambda: None)
    loaded = load_model(folder, weights_hash=weights, **options)
    change(loaded.model)
    weights.check_arrays(loaded.model)
    return loaded, weights.value()


def test_files_and_how_they_are_read_count(tiny: Any, tmp_path: Path) -> None:
    adapters = [write_adapter(tmp_path / f"{n}", tiny("llama"), num_layers=n) for n in (1, 2)]
    folder = shutil.copytree(tiny("llama"), tmp_path / "copy")
    values = [hashed(tiny("llama"))[1], *(hashed(tiny("llama"), adapter=a)[1] for a in adapters)]
    assert len({*values, None}) == 4
    assert hashed(folder)[1] == values[0], "wherever it lies"


def test_a_large_folder_in_parts_is_hashed_part_by_part(tiny: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "parts")
    weights = dict(mx.load(str(folder / "model.safetensors")))
    (folder / "model.safetensors").unlink()
    for number, names in enumerate((sorted(weights)[:5], sorted(weights)[5:])):
        mx.save_safetensors(str(folder / f"model-{number}.safetensors"), {name: weights[name] for name in names})
    before = hashed(folder)[1]
    changed = {name: weights[name] for name in sorted(weights)[5:]}
    changed[sorted(weights)[5]] = -changed[sorted(weights)[5]]
    mx.save_safetensors(str(folder / "model-1.safetensors"), changed)
    assert None is not hashed(folder)[1] != before is not None


def _first(model: Any) -> Any:
    return model.layers[0].self_attn.q_proj


def _written(model: Any) -> None:
    _first(model).weight[0] = 7


def _replaced(model: Any) -> None:
    _first(model).weight = mx.array(_first(model).weight + 0)


def _transposed(model: Any) -> None:
    _first(model).weight = _first(model).weight.T


def _exchanged(model: Any) -> None:
    one, other = (layer.self_attn.q_proj for layer in model.layers[:2])
    one.weight, other.weight = other.weight, one.weight


def _narrower(model: Any) -> None:
    model.set_dtype(mx.float16)


def _with_a_bias(model: Any) -> None:
    _first(model).bias = mx.ones((32,))


CHANGES = [_written, _replaced, _transposed, _exchanged, _narrower, _with_a_bias]


@pytest.mark.parametrize("change", CHANGES)
def test_what_an_app_changes_in_memory_is_not_the_files(change: Any, tiny: Any) -> None:
    assert hashed(tiny("llama"), change)[1] is None


@pytest.mark.parametrize("change", CHANGES)
def test_arrays_are_still_held_if_their_bits_are_the_same(change: Any, tiny: Any) -> None:
    """Those that a model's own pass made anew are; whatever an app changed is not."""
    weights, model = WeightsHash(lambda: None), load_model(tiny("llama")).model
    assert not weights.has_held_arrays(model)
    weights.hold_arrays(model)
    assert weights.has_held_arrays(model)
    model.update(tree_map(lambda array: mx.array(np.array(array)), model.parameters()))
    assert weights.has_held_arrays(model)
    change(model)
    assert weights.has_held_arrays(model) is (change is _replaced)


def test_who_does_not_check_gets_no_hash(tiny: Any) -> None:
    weights = WeightsHash(lambda: None)
    assert weights.value() is None
    loaded = load_model(tiny("llama"), weights_hash=weights)
    assert weights.value() is None
    weights.check_arrays(loaded.model)
    assert weights.value() is not None
    weights.cancel()
    assert weights.value() is None


def test_files_that_change_while_they_are_loaded_have_no_hash(tiny: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "changing")

    def mend(model: Any) -> None:
        data = bytearray((folder / "model.safetensors").read_bytes())
        data[-1] ^= 0x80
        (folder / "model.safetensors").write_bytes(data)

    assert hashed(folder, mend)[1] is None


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16, mx.uint8, mx.bool_])
def test_arrays_of_any_form_are_hashed_by_their_numbers_in_order(dtype: mx.Dtype) -> None:
    """Strided, transposed, of one number or none: the hash is that of a dense copy."""
    numbers = mx.array(np.random.default_rng(0).integers(0, 2, (6, 4))).astype(dtype)
    for array in (numbers, numbers.T, numbers[::2], numbers[:, 1], numbers[:0], numbers[0, 0]):
        copy = mx.array(np.array(array.astype(mx.float32))).astype(dtype)
        assert hash_arrays([array]) == hash_arrays([copy])
    assert hash_arrays([numbers]) != hash_arrays([mx.contiguous(numbers.T)])
    assert hash_arrays([numbers, numbers[0]]) != hash_arrays([numbers[0], numbers])
