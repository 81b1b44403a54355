"""The vision tower, the positions and the rotation of Qwen3-VL and Qwen3.5 are what transformers' own torch classes say
(`record.py` recorded it), in every stored layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.vision import qwen, towers
from support.models.draft_heads import Tensors, pack, rounded
from support.models.recorded_towers import config_of, converted, difference, features, recorded, tensors_of
from support.models.towers import uniform

NAMES = ("qwen3_vl", "qwen3_5")
by_name = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)


def read(folder: Path, name: str, tensors: Tensors, **options: Any) -> Any:
    mx.save_safetensors(str(folder / "model.safetensors"), tensors | {"model.norm.weight": mx.ones(3)})
    return qwen.read_tower(folder, config_of(name), mx.float32, **options)


@by_name
def test_features_are_those_of_transformers_from_every_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tensors = tensors_of(name)
    bare = {path.removeprefix("model."): value for path, value in tensors.items()}
    for stored in (tensors, bare, converted(tensors)):
        assert difference(name, read(tmp_path, name, stored)) < 1e-4
    monkeypatch.setattr(towers, "MAX_SCORES", 600)  # attention in parts of 3 to 75 queries
    assert difference(name, read(tmp_path, name, tensors)) < 1e-4


@by_name
def test_a_packed_tower_computes_what_its_rounded_weights_compute(tmp_path: Path, name: str) -> None:
    packed = pack(converted(tensors_of(name)), lambda path: 4)
    assert sum(path.endswith(".scales") for path in packed) > 8
    wanted = features(name, read(tmp_path, name, rounded(tensors_of(name), lambda path: 4)))
    for keep_packed in (True, False):
        assert difference(name, read(tmp_path, name, packed, keep_packed=keep_packed), wanted) < 1e-4
    assert difference(name, read(tmp_path, name, packed)) > 1e-2


def test_a_tower_runs_block_by_block_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = read(tmp_path, "qwen3_vl", tensors_of("qwen3_vl"))
    state = tower.begin(mx.zeros((1024, 96)), (1, 32, 32))
    with pytest.raises(ValueError, match="through 0 of 3 blocks"):
        tower.finish(state)
    mx.eval(state.arrays)
    monkeypatch.setattr(towers, "MAX_SCORES", 1 << 16)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    tower.step(state)
    mx.eval(state.arrays)
    assert mx.get_peak_memory() - before < 5e6  # all scores at once are 8.4e6 bytes
    assert (len(state.arrays), state.next_block) == (2, 1)
    for patches, grid in (((8, 96), (1, 4, 4)), ((8, 95), (1, 2, 4)), ((9, 96), (1, 3, 3))):
        with pytest.raises(ValueError, match="multiples of 2, and a patch has 96 numbers"):
            tower.begin(mx.zeros(patches), grid)


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
    assert read(tmp_path, "qwen3_5", {}) is None
    assert qwen.read_tower(tmp_path, {"model_type": "qwen3_5"}, mx.float32) is None
    odd = {"num_heads": 3, "depth": "3", "hidden_act": "silu", "num_position_embeddings": 35, "patch_size": [4, 4]}
    for name, value in (odd | {"deepstack_visual_indexes": [-1], "rope_parameters": {"rope_theta": 5.0}}).items():
        with pytest.raises(ModelUnsupported, match="vision"):
            qwen.TowerConfig.from_config(sizes | {name: value})


def test_positions_are_those_of_transformers_for_none_to_four_images() -> None:
    for name, parts in recorded("positions")["prompts"].items():
        spans: list[qwen.ImageSpan] = []
        length = 0
        for part in parts:
            if not isinstance(part, int):
                spans.append(qwen.ImageSpan(length, part[0], part[1] // 2, part[2] // 2))
            length = length + part if isinstance(part, int) else spans[-1].end
        positions, deltas = qwen.rope_positions(length, spans)
        np.testing.assert_array_equal(positions, recorded("positions")[name])
        assert [0, *deltas][-1] == recorded("positions")[f"{name} delta"]
        for span, delta in zip(spans, deltas, strict=True):
            assert (positions[:, span.end : span.end + 1] == span.end + delta).all()
    for start, length in ((3, 9), (5, 10)):
        with pytest.raises(ValueError, match="image at tokens"):
            qwen.rope_positions(length, [qwen.ImageSpan(0, 1, 2, 2), qwen.ImageSpan(start, 1, 2, 3)])


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
