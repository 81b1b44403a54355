"""What `tests/vision/record.py` recorded of other makers' vision towers, and the same for one of ours."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from cortexmlx.vision import towers
from cortexmlx.vision.families import FAMILIES
from support.models.towers import tower_tensor, uniform

Tensors = dict[str, mx.array]

FOLDER = Path(__file__).parents[2] / "vision" / "recorded"


@cache
def recorded(name: str) -> dict[str, Any]:
    """Return the arrays of a recorded file, and what it holds as JSON."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return {key: json.loads(str(value)) if value.dtype.kind == "U" else value for key, value in file.items()}


def config_of(name: str) -> dict[str, Any]:
    """Return the config.json of a recorded tower, with the shapes of its tensors in `shapes`."""
    config: dict[str, Any] = recorded(f"tower_{name}")["config"]
    return config


def tensors_of(name: str) -> Tensors:
    """Return the tensors of a recorded tower under the names that its maker gives them."""
    shapes = config_of(name)["shapes"].items()
    return {path: mx.array(tower_tensor(path.removeprefix("model.visual."), shape)) for path, shape in shapes}


def read(folder: Path, name: str, tensors: Tensors, *, keep_packed: bool = True, **changes: Any) -> Any:
    """Return the tower of a model that has these tensors, and others. `changes` are those of its config.json."""
    mx.save_safetensors(str(folder / "model.safetensors"), tensors | {"model.norm.weight": mx.ones(3)})
    config = config_of(name) | changes
    return FAMILIES[name].read_tower(folder, config, mx.float32, keep_packed=keep_packed)


def converted(tensors: Tensors) -> Tensors:
    """Return tensors as mlx-vlm converts them: other names, and the channels of a convolution last."""
    renamed = {path.replace("model.visual", "vision_tower"): value for path, value in tensors.items()}
    renamed = {path.replace("model.vision_tower", "vision_tower.vision_model"): v for path, v in renamed.items()}
    renamed = {path.replace("model.multi_modal", "multi_modal"): value for path, value in renamed.items()}
    return {path: value.moveaxis(1, -1) if value.ndim > 3 else value for path, value in renamed.items()}


def features(name: str, tower: Any) -> list[np.ndarray]:
    """Return the features of every recorded image, each followed by its deepstack features."""
    found, patch = [], config_of(name)["vision_config"]["patch_size"]
    for number, grid in enumerate(recorded(f"tower_{name}")["grids"].tolist()):
        if "qwen" in name:
            patches = uniform(f"pixels {number}", (int(np.prod(grid)), 6 * patch**2))
        else:
            rows, columns = (range(0, count * patch, patch) for count in grid[1:])
            image = uniform(f"pixels {number}", (3, rows.stop, columns.stop))
            patches = np.stack([image[:, y : y + patch, x : x + patch].ravel() for y in rows for x in columns])
        merged, deepstack = towers.run_pieces(tower.see(mx.array(patches), tuple(grid)))
        if "qwen" not in name:  # zeros are behind each row of tokens
            merge = config_of(name).get("spatial_merge_size", 1)
            cut = merged.reshape(grid[1] // merge, grid[2] // merge + 1, -1)
            assert not np.array(cut[:, -1]).any()
            merged = cut[:, :-1].flatten(0, 1)
        found += [np.array(each) for each in (merged, *deepstack)]
    return found


def difference(name: str, tower: Any, wanted: list[np.ndarray] | None = None) -> float:
    """Return how far features are at most from those that are wanted: from the recorded ones, if none are given."""
    wanted = wanted or [value for key, value in recorded(f"tower_{name}").items() if key[:4] in ("feat", "deep")]
    return max(float(np.abs(a - b).max()) for a, b in zip(features(name, tower), wanted, strict=True))
