"""The tower of Pixtral and the projectors behind it are what transformers' own torch classes say (`record.py` recorded
it), in every stored layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.vision import pixtral, towers
from support.models.draft_heads import Tensors, pack, rounded
from support.models.recorded_towers import config_of, converted, features, recorded, tensors_of

by_name = pytest.mark.parametrize("name", ["mistral3", "llava"])


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)


def read(folder: Path, name: str, tensors: Tensors, **changes: Any) -> Any:
    mx.save_safetensors(str(folder / "model.safetensors"), tensors | {"model.norm.weight": mx.ones(3)})
    return pixtral.read_tower(folder, config_of(name) | changes, mx.float32)


def difference(name: str, tower: Any, wanted: list[np.ndarray] | None = None) -> float:
    """How far an image's features are at most from the recorded ones. Zeros are behind each row of tokens."""
    worst, merge = 0.0, config_of(name).get("spatial_merge_size", 1)
    for number, (given, (_, rows, columns)) in enumerate(
        zip(features(name, tower), recorded(f"tower_{name}")["grids"], strict=True)
    ):
        given = given.reshape(rows // merge, columns // merge + 1, -1)
        assert not given[:, -1].any()
        told = recorded(f"tower_{name}")[f"features {number}"] if wanted is None else wanted[number]
        worst = max(worst, float(np.abs(given[:, :-1].reshape(told.shape) - told).max()))
    return worst


@by_name
def test_features_are_those_of_transformers_from_every_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tensors = tensors_of(name)
    bare = {path.removeprefix("model."): value for path, value in tensors.items()}
    for stored in (tensors, bare, converted(tensors)):
        assert difference(name, read(tmp_path, name, stored)) < 1e-4
    monkeypatch.setattr(towers, "MAX_SCORES", 600)  # attention in parts
    assert difference(name, read(tmp_path, name, tensors)) < 1e-4


def test_a_packed_tower_computes_what_its_rounded_weights_compute(tmp_path: Path) -> None:
    packed = pack(converted(tensors_of("mistral3")), lambda path: 4)
    assert sum(path.endswith(".scales") for path in packed) > 8
    wanted = features("mistral3", read(tmp_path, "mistral3", rounded(tensors_of("mistral3"), lambda path: 4)))
    given = features("mistral3", read(tmp_path, "mistral3", packed))
    assert max(np.abs(a - b).max() for a, b in zip(given, wanted, strict=True)) < 1e-4
    assert difference("mistral3", read(tmp_path, "mistral3", packed)) > 1e-2


def test_other_towers_are_refused_or_not_there(tmp_path: Path) -> None:
    tensors, config = tensors_of("mistral3"), config_of("mistral3")
    tower = read(tmp_path, "mistral3", tensors)
    for patches, grid in (((8, 48), (1, 4, 4)), ((8, 47), (1, 2, 4)), ((9, 48), (1, 3, 3)), ((8, 48), (2, 2, 2))):
        with pytest.raises(ValueError, match="multiples of 2, and a patch has 48 numbers"):
            tower.begin(mx.zeros(patches), grid)
    with pytest.raises(ValueError, match="through 0 of 2 blocks"):
        tower.finish(tower.begin(mx.zeros((4, 48)), (1, 2, 2)))
    with pytest.raises(ModelUnsupported, match=r"1 tensors that are not read, for example odd\.weight"):
        read(tmp_path, "mistral3", tensors | {"model.vision_tower.odd.weight": mx.ones(2)})
    with pytest.raises(ModelCorrupt, match=r"lacks 1 of \d+ tensors"):
        read(tmp_path, "mistral3", dict(list(tensors.items())[1:]))
    with pytest.raises(ModelCorrupt, match=r"named model\..* and .*vision_tower\.vision_model\.\*"):
        read(tmp_path, "mistral3", tensors | converted(tensors))
    assert read(tmp_path, "mistral3", {}) is None
    assert read(tmp_path, "llava", tensors_of("llava"), vision_config={"model_type": "clip_vision_model"}) is None
    vision: dict[str, Any] = config["vision_config"]
    odd = {"num_attention_heads": 3, "hidden_size": "32", "hidden_act": "relu", "patch_size": [4, 4], "head_dim": 8}
    changes: list[dict[str, Any]] = [{"vision_config": vision | {name: value}} for name, value in odd.items()]
    changes += [{"spatial_merge_size": 0}, {"text_config": {}}, {"vision_feature_layer": [1, 2]}]
    changes += [{"projector_hidden_act": "relu"}, {"vision_feature_select_strategy": "default"}]
    for change in changes:
        with pytest.raises(ModelUnsupported, match="no tower with that is known"):
            read(tmp_path, "mistral3", tensors, **change)
