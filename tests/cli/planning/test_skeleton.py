"""A model without its numbers is counted as its makers publish it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.cli.planning.skeleton import build_skeleton
from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.kv.spec import KVSpec, LayerGroup
from support.models.published import DEEPSEEK_V3, GEMMA3_1B, MAMBA, QWEN3_8B
from support.models.tiny import CONFIGS


def test_a_model_of_published_size_is_counted_exactly_and_nothing_is_allocated() -> None:
    mx.reset_peak_memory()
    before = mx.get_active_memory()  # what other tests left
    skeleton = build_skeleton(QWEN3_8B)
    assert (skeleton.parameters, skeleton.weight_bytes) == (8_190_735_360, 2 * 8_190_735_360)
    assert skeleton.groups == (LayerGroup(KVSpec(8, 128, 128, "bfloat16"), tuple(range(36))),)
    assert build_skeleton(GEMMA3_1B).parameters == 999_885_952
    assert build_skeleton(DEEPSEEK_V3).parameters == 671_026_419_200
    assert mx.get_peak_memory() - before < 2**20


def test_latents_windows_and_recurrent_state_are_told_apart() -> None:
    assert build_skeleton(DEEPSEEK_V3).groups == (LayerGroup(KVSpec(1, 512, 64, "bfloat16"), tuple(range(61))),)
    near, far = build_skeleton(GEMMA3_1B).groups
    assert (near.spec, len(near.layers)) == (KVSpec(1, 256, 256, "bfloat16", window=512), 22)
    assert (far.spec, far.layers) == (KVSpec(1, 256, 256, "bfloat16"), (5, 11, 17, 23))
    (mamba,) = build_skeleton(MAMBA).groups
    assert (mamba.spec.kv_heads, mamba.layers) == (0, tuple(range(64)))
    assert mamba.spec.row_bytes > 80 * 64 * 128 * 2


def test_quantized_weights_take_their_bits_and_scales() -> None:
    quantized = build_skeleton({**QWEN3_8B, "quantization": {"group_size": 64, "bits": 4}})
    assert quantized.weight_bytes == pytest.approx(8_190_735_360 * 4.5 / 8, rel=0.001)
    assert quantized.parameters == 8_190_735_360


def test_what_the_engine_refuses_is_said_with_its_reason() -> None:
    for config in (QWEN3_8B, GEMMA3_1B, MAMBA):
        skeleton = build_skeleton(config)
        assert (skeleton.refusal, skeleton.most_rows, skeleton.notes) == (None, None, ())
    plamo3 = CONFIGS["llama"] | {"model_type": "plamo3", "sliding_window": 8, "sliding_window_pattern": 2}
    assert "see 9 tokens, but only 8" in str(build_skeleton(plamo3).refusal)
    with pytest.raises(ModelUnsupported, match="mlx-lm says of 'olmo': To run olmo install ai2-olmo"):
        build_skeleton({"model_type": "olmo"})


@pytest.mark.parametrize("kind", ["no_such_thing", "base"])
def test_an_unknown_architecture_is_not_guessed(kind: str) -> None:
    """Nor is a module of mlx-lm's that is no model."""
    with pytest.raises(ModelUnsupported, match=f"mlx-lm has no architecture '{kind}'"):
        build_skeleton({"model_type": kind})


@pytest.mark.parametrize(
    "odd",
    [
        {"num_key_value_heads": 3},
        {"quantization": {"group_size": 0, "bits": 4}},
        {"quantization": {"group_size": 32, "bits": 7}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": None},
    ],
    ids=["heads", "groups", "bits", "no positions"],
)
def test_what_mlx_lm_cannot_compute_is_said_in_a_line(odd: dict[str, Any]) -> None:
    with pytest.raises(ModelUnsupported, match="mlx-lm's code for 'qwen3' fails with this configuration"):
        build_skeleton(CONFIGS["qwen3"] | odd)


def test_a_dtype_that_is_none_is_as_if_it_were_not_there() -> None:
    for odd in ({"torch_dtype": ["float16"]}, {"torch_dtype": None, "text_config": "none"}):
        assert build_skeleton(CONFIGS["qwen3"] | odd).dtype == "bfloat16"


def test_one_request_at_a_time_is_said_with_its_reason(unpaged: None) -> None:
    skeleton = build_skeleton(QWEN3_8B)
    assert skeleton.refusal is None and skeleton.most_rows == 1
    assert skeleton.notes == ("one request runs at a time, on mlx-lm's own caches. tiny: a test wants it so",)


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU computes them packed")
def test_what_becomes_float32_on_a_cpu_is_not_refused_there() -> None:
    skeleton = build_skeleton(CONFIGS["llama"] | {"model_type": "bitnet"})
    assert skeleton.refusal is None
    assert skeleton.weight_bytes < skeleton.parameters, "two bits for each of most"


@pytest.mark.parametrize("odd", [{"num_hidden_layers": 2**31}, {"text_config": {"n_layers": 10**20}}])
def test_more_layers_than_any_model_has_are_not_built(odd: dict[str, Any]) -> None:
    with pytest.raises(ModelCorrupt, match="no model has more than"):
        build_skeleton(CONFIGS["qwen3"] | odd)


def test_what_mlx_says_of_a_wrong_type_is_one_line() -> None:
    with pytest.raises(ModelUnsupported, match="does not fit 'qwen3'") as refused:
        build_skeleton(CONFIGS["qwen3"] | {"intermediate_size": "64"})
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_a_setting_that_mlx_lm_does_not_read_is_refused_as_by_a_chat() -> None:
    with pytest.raises(ModelUnsupported, match=r"^config\.json has hidden_act \"relu\", but mlx-lm computes qwen3"):
        build_skeleton(CONFIGS["qwen3"] | {"hidden_act": "relu"})
