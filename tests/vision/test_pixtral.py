"""The towers of Pixtral are those that are known: `test_towers.py` computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from support.models.recorded_towers import config_of, converted, read, tensors_of


def test_other_towers_are_refused_or_not_there(tmp_path: Path) -> None:
    tensors, config = tensors_of("mistral3"), config_of("mistral3")
    tower = read(tmp_path, "mistral3", tensors)
    for patches, grid in (((8, 48), (1, 4, 4)), ((8, 47), (1, 2, 4)), ((9, 48), (1, 3, 3)), ((8, 48), (2, 2, 2))):
        with pytest.raises(ValueError, match="multiples of 2, and a patch has 48 numbers"):
            next(tower.see(mx.zeros(patches), grid))
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
