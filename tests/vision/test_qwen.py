"""The positions and the rotation of Qwen3-VL and Qwen3.5 are what transformers' own torch classes say (`record.py`
recorded it), and their towers those that are known: `test_towers.py` computes them.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.types.images import PlacedImage, PreparedImage
from cortexmlx.vision import qwen
from support.models.recorded_towers import config_of, converted, read, recorded, tensors_of
from support.models.towers import uniform

by_name = pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)


def test_other_towers_are_refused_or_not_there(tmp_path: Path) -> None:
    tensors, sizes = tensors_of("qwen3_vl"), config_of("qwen3_vl")["vision_config"]
    for change, error, message in (
        ({"odd.weight": mx.ones(2)}, ModelUnsupported, r"vision tower .* for example model\.visual\.odd\.weight"),
        ({"merger.norm.bias": mx.ones(2)}, ModelCorrupt, r"model\.visual\.merger.norm.bias .* asks for"),
        ({"merger.linear_fc1.scales": mx.ones((128, 0))}, ModelCorrupt, r"packed model\.visual\.\* .* do not fit"),
    ):
        with pytest.raises(error, match=message):
            read(tmp_path, "qwen3_vl", tensors | {f"model.visual.{path}": value for path, value in change.items()})
    with pytest.raises(ModelCorrupt, match=r"vision tower in .* lacks 1 of \d+ tensors"):
        read(tmp_path, "qwen3_vl", dict(list(tensors.items())[1:]))
    with pytest.raises(ModelCorrupt, match=r"named model\.visual\.\* and vision_tower\.\*"):
        read(tmp_path, "qwen3_vl", tensors | converted(tensors))
    for patches, grid in (((8, 96), (1, 4, 4)), ((8, 95), (1, 2, 4)), ((9, 96), (1, 3, 3))):
        with pytest.raises(ValueError, match="multiples of 2, and a patch has 96 numbers"):
            next(read(tmp_path, "qwen3_vl", tensors).see(mx.zeros(patches), grid))
    assert read(tmp_path, "qwen3_5", {}) is None
    assert qwen.read_tower(tmp_path, {"model_type": "qwen3_5"}, mx.float32) is None
    odd = {"num_heads": 3, "depth": "3", "hidden_act": "silu", "num_position_embeddings": 35, "patch_size": [4, 4]}
    for name, value in (odd | {"deepstack_visual_indexes": [-1], "rope_parameters": {"rope_theta": 5.0}}).items():
        with pytest.raises(ModelUnsupported, match="vision"):
            qwen.TowerConfig.from_config(sizes | {name: value})


def placed(start: int, *grid: int) -> PlacedImage:
    return PlacedImage(start, PreparedImage(b"", np.zeros((1, 1), np.float32), grid, grid))  # type: ignore[arg-type]


def test_positions_are_those_of_transformers_for_none_to_four_images() -> None:
    for name, parts in recorded("positions")["prompts"].items():
        spans: list[PlacedImage] = []
        length = 0
        for part in parts:
            if not isinstance(part, int):
                spans.append(placed(length, part[0], part[1] // 2, part[2] // 2))
            length = length + part if isinstance(part, int) else spans[-1].end
        positions, deltas = qwen.rope_positions(length, spans)
        np.testing.assert_array_equal(positions, recorded("positions")[name])
        assert [0, *deltas][-1] == recorded("positions")[f"{name} delta"]
        for span, delta in zip(spans, deltas, strict=True):
            assert (positions[:, span.end : span.end + 1] == span.end + delta).all()
    for start, length in ((3, 9), (5, 10)):
        with pytest.raises(ValueError, match="image at tokens"):
            qwen.rope_positions(length, [placed(0, 1, 2, 2), placed(start, 1, 2, 3)])


@by_name
def test_heads_turn_as_in_transformers_and_as_text_where_positions_are_equal(name: str) -> None:
    told, settings = recorded("rotations"), recorded("rotations")["ropes"][name]
    dims = int(told[name].shape[-1] * settings.get("partial_rotary_factor", 1))
    rope, sections = nn.RoPE(dims, base=settings["rope_theta"]), tuple(settings["mrope_section"])
    queries, positions = mx.array(uniform(f"queries {name}", told[name].shape)), mx.array(told["positions"], mx.int32)
    turned = qwen.rotate(queries, positions, sections, dims, rope)
    assert np.abs(np.array(turned) - told[name]).max() < 1e-4
    turned = qwen.rotate(queries, mx.tile(positions[:1], (3, 1)), sections, dims, rope)
    assert mx.array_equal(turned, rope(queries, offset=positions[0]))
