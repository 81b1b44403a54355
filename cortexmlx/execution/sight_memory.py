"""Predicts the memory that a model takes for images, beside its text part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from cortexmlx.errors import CortexError, ModelCorrupt
from cortexmlx.execution.graph_memory import peak_bytes, trace_graph
from cortexmlx.vision import sight, towers
from cortexmlx.vision.families import FAMILIES
from cortexmlx.vision.images import Image, ImageProcessor
from cortexmlx.vision.reader import MAX_TOKENS


@dataclass(frozen=True)
class SightBytes:
    """Bytes that a model takes for images. The vision tower may run during a step of the text part, so they add up."""

    weights: int
    """The vision tower."""
    features: int
    """The features that are kept, at most."""
    image: int
    """What the largest image takes on its way through the tower, with its patches."""

    @property
    def total(self) -> int:
        """All of these together."""
        return self.weights + self.features + self.image


def predict_model_sight_bytes(
    folder: Path, config: Mapping[str, Any], dtype: mx.Dtype, *, keep_packed: bool
) -> SightBytes | None:
    """Return the bytes that the model in `folder` takes for images, with the vision tower as an engine loads it; None
    if the model takes no images. No weights are read.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    evaluating = towers.EVALUATE.set(lambda arrays: None)
    try:
        tower = None if family is None else family.read_tower(folder, config, dtype, keep_packed=keep_packed)
        return None if tower is None else predict_sight_bytes(tower, folder)
    except CortexError:
        return None
    finally:
        towers.EVALUATE.reset(evaluating)


def predict_sight_bytes(tower: towers.Tower, folder: Path) -> SightBytes:
    """Return the bytes of a model's vision tower, and of the largest images that the processor in `folder` makes. The
    tower's last block is traced: nothing is computed. Raises what `ImageProcessor` raises, and ModelCorrupt if it does
    not fit the tower.
    """
    processor = ImageProcessor(folder, MAX_TOKENS)
    grid = processor.largest_grid
    numbers = processor.make_patches(Image(np.zeros((64, 64, 3), np.uint8), b"")).patches.shape[1]
    patches = mx.zeros((grid[0] * grid[1] * grid[2], numbers))
    names, weights = zip(*tree_flatten(tower.parameters()), strict=True)
    computed_first: list[tuple[mx.array, ...]] = []
    untraced = kept = 0

    def run_tower(patches: mx.array, *arrays: mx.array) -> list[mx.array]:
        nonlocal untraced, kept
        tower.update(tree_unflatten(list(zip(names, arrays, strict=True))))
        pieces = tower.see(patches, grid, [tower.depth - 1][: tower.depth])
        try:
            while True:
                computed_first.append(tuple(next(pieces)))
        except StopIteration as end:
            tokens, deep = end.value
        untraced, kept = (tower.deep_layers - len(deep)) * tokens.nbytes, (1 + tower.deep_layers) * tokens.nbytes
        return [tokens, *deep]

    try:
        graph = trace_graph(run_tower, patches, *weights, computed_first=computed_first)
    except ValueError as error:
        raise ModelCorrupt(
            f"the image settings in {folder} do not fit its tower: {error}. Download it again."
        ) from error
    finally:
        tower.update(tree_unflatten(list(zip(names, weights, strict=True))))
    image = peak_bytes(graph, waits=True) + untraced + patches.nbytes
    return SightBytes(tower.nbytes, max(sight.FEATURE_BYTES, kept), image)
