"""Folders quantized in every way that mlx-lm writes, and in those of others that it reads: the tokens are mlx-lm's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx.errors import ModelUnsupported
from cortexmlx.models import load_model
from support.engine.core_driver import Driver
from support.engine.judge import NOISE, disagreement, greedy
from support.models.tiny import tokens_of, write_tiny

pytestmark = pytest.mark.usefixtures("a_linux_cpu")

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
PROMPTS = [tokens_of(n, seed=n) for n in (5, 33)]
Predicate = Callable[[str, Any], Any]


def quantized(folder: Path, name: str, predicate: Predicate | None = None, dtype: str = "bfloat16", **how: Any) -> Path:
    """A tiny model through mlx-lm's own `quantize_model` and `save_model`."""
    import mlx.core as mx
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    write_tiny(folder, name, **SIZES)
    model, config = load_model(folder)
    model.set_dtype(getattr(mx, dtype))
    settings = {"group_size": None, "bits": None, "mode": "affine"} | how
    model, config = quantize_model(model, config, quant_predicate=predicate, **settings)
    (folder / "model.safetensors").unlink()
    save_model(folder, model)
    save_config(config, folder / "config.json")
    return folder


def assert_mlx_lms_tokens(folder: Path, count: int = 10) -> None:
    """As they are packed and as float32."""
    import mlx.core as mx
    from mlx_lm import load

    judge, tokenizer = load(str(folder))
    judge.set_dtype(mx.float32)
    wanted = [greedy(judge, tokenizer, prompt, count) for prompt in PROMPTS]
    for dequantize in (False, True):
        driver = Driver(folder, dequantize=dequantize)
        for prompt, mine, theirs in zip(PROMPTS, driver.answers(PROMPTS, count, ignore_eos=False), wanted, strict=True):
            gap = disagreement(judge, prompt, mine, theirs)
            assert gap is None or gap[1] < NOISE, f"dequantize {dequantize}: differs at {gap[0]} by {gap[1]}"


def mixed(path: str, module: Any) -> Any:
    """What mixed recipes do, DWQ's among them: more bits where it counts, other formats, some layers not at all."""
    if "down_proj" in path or "embed" in path:
        return {"bits": 6, "group_size": 64}
    if "up_proj" in path:
        return {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    return "q_proj" not in path


def test_a_recipe_for_every_layer(tmp_path: Path) -> None:
    assert_mlx_lms_tokens(quantized(tmp_path / "m", "llama", mixed))


def test_activations_that_are_quantized_too_are_refused_on_a_cpu(tmp_path: Path) -> None:
    folder = quantized(tmp_path / "m", "llama", mode="nvfp4")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantize_activations": True}))
    for dequantize in (False, True):
        with pytest.raises(ModelUnsupported, match="quantize their activations"):
            load_model(folder, dequantize=dequantize)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_all_bits_in_all_groups(tmp_path: Path, name: str, bits: int, group: int) -> None:
    assert_mlx_lms_tokens(quantized(tmp_path / "m", name, bits=bits, group_size=group, dtype="float16"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_oss", "qwen3"])
@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_all_formats_of_small_floats(tmp_path: Path, name: str, mode: str) -> None:
    assert_mlx_lms_tokens(quantized(tmp_path / "m", name, mode=mode))


def test_experts_with_a_scale_of_their_own_become_float32_or_are_refused(tmp_path: Path) -> None:
    folder = quantized(tmp_path / "m", "mixtral", mode="nvfp4", global_scale=True)
    assert load_model(folder).dtype == "float32"
    with pytest.raises(ModelUnsupported, match=r"nvfp4 experts .* dequantize=True"):
        load_model(folder, dequantize=False)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring outputs is at each place of a 32-bit word, from the lowest bits on."""


def pack_awq(values: np.ndarray) -> np.ndarray:
    """4-bit values `[inputs, outputs]` as AutoAWQ packs them."""
    eights = values.reshape(len(values), -1, 8).astype(np.uint32)
    words = np.zeros(eights.shape[:2], np.uint32)
    for place, index in enumerate(AWQ_ORDER):
        words |= eights[:, :, index] << np.uint32(4 * place)
    return words.view(np.int32)


def test_awq_is_read_as_its_makers_mean_it(tmp_path: Path) -> None:
    """A weight is (code - zero) * scale, by groups of inputs. Zeros and scales are chosen so that float16 has all."""
    import mlx.core as mx

    settings = {"quant_method": "awq", "bits": 4, "group_size": 64}
    folder = write_tiny(tmp_path / "m", **SIZES, quantization_config=settings)
    file = str(folder / "model.safetensors")
    weights: Any = {name: array.astype(mx.float16) for name, array in mx.load(file).items()}
    rng, exact = np.random.default_rng(1), {}
    for name in [name for name in weights if "_proj" in name]:
        outputs, inputs = weights.pop(name).shape
        codes, zeros = (rng.integers(0, 16, (rows, outputs)) for rows in (inputs, inputs // 64))
        scales = 2.0 ** rng.integers(-7, -4, (inputs // 64, outputs))
        exact[name] = ((codes - zeros.repeat(64, 0)) * scales.repeat(64, 0)).T
        stem = name.removesuffix("weight")
        weights |= {f"{stem}qweight": mx.array(pack_awq(codes)), f"{stem}qzeros": mx.array(pack_awq(zeros))}
        weights[f"{stem}scales"] = mx.array(scales.astype(np.float16))
    mx.save_safetensors(file, weights)
    model = dict(load_model(folder).model.named_modules())
    assert len(exact) == 14
    for name, wanted in exact.items():
        assert np.array_equal(np.array(model[name.removesuffix(".weight")].weight), wanted.astype(np.float32)), name


def test_gptq_is_refused_by_name(tmp_path: Path) -> None:
    import mlx.core as mx

    folder = write_tiny(tmp_path / "m", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    file = str(folder / "model.safetensors")
    weights: Any = dict(mx.load(file))
    weights["model.layers.0.mlp.up_proj.g_idx"] = mx.arange(32)
    mx.save_safetensors(file, weights)
    with pytest.raises(ModelUnsupported, match=r"quantized as gptq.*g_idx.*mlx_lm\.convert"):
        load_model(folder)


def test_ternary_weights_become_float32_or_are_refused(tmp_path: Path) -> None:
    import mlx.core as mx

    folder = write_tiny(tmp_path / "m", quantization_config={"quant_method": "bitnet", "linear_class": "autobitlinear"})
    file = str(folder / "model.safetensors")
    weights: Any = dict(mx.load(file))
    for name in [name for name in weights if "_proj" in name]:
        rows, inputs = weights[name].shape
        weights[name] = mx.random.randint(0, 85, (rows // 4, inputs)).astype(mx.uint8)
        weights[name.removesuffix("weight") + "weight_scale"] = mx.array([0.3])
    mx.save_safetensors(file, weights)
    with pytest.raises(ModelUnsupported, match=r"ternary layers .* dequantize=True"):
        load_model(folder, dequantize=False)
    assert len(Driver(folder).answers(PROMPTS, 4)[1]) == 4
