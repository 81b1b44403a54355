"""What the vision towers of all families share: an image between two blocks, attention among its patches, and how the
tensors are read, which mlx-lm's classes drop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from cortexmlx.errors import ModelCorrupt
from cortexmlx.models import weights as model_weights
from cortexmlx.models.draft_head import check_tensors, quantize_head
from cortexmlx.models.folder import translate_weight_errors
from cortexmlx.models.safetensors_check import find_tensors

FUSED_DIMS = (64, 80, 128)
"""The head dimensions that MLX's fused attention on Apple GPUs has (`sdpa_full_supported_head_dim`). Heads of 72 are
padded, as in mlx-vlm's `ensure_fused_sdpa`: otherwise all scores are in memory at once.
"""

MAX_SCORES = 1 << 25
"""How many scores are computed at once where attention is not fused, as on a CPU: 128 MB in float32."""

EVALUATE: ContextVar[Callable[[list[Any]], object]] = ContextVar("EVALUATE", default=mx.eval)
"""Computes arrays. Where nothing shall be computed, it notes them at most: see `execution/sight_memory.py`."""


@dataclass
class TowerState:
    """An image on its way through a tower, between two blocks."""

    hidden: mx.array
    """`[patches, hidden]`, in the tower's type."""
    cosine: mx.array
    """Of the angles of each patch, `[patches, 1, head_dim / 2]` float32."""
    sine: mx.array
    grid: tuple[int, int, int]
    """Frames, and rows and columns of patches. Patches see each other within a frame. An image is one."""
    next_block: int = 0
    deepstack: list[mx.array] = field(default_factory=list)
    """Features `[tokens, out_hidden]` of the blocks so far."""

    @property
    def arrays(self) -> list[mx.array]:
        """Return what a step left to be computed: evaluate it before the next step to bound time and memory."""
        return [self.hidden, *self.deepstack]


class Tower(nn.Module):  # type: ignore[misc]
    """Turns the patches of one image into features, the embeddings of its tokens for the language model.

    Call `begin`, then `step` for each of the `depth` blocks, then `finish`. Other work may run in between. Nothing is
    evaluated, but where many scores are computed in parts.
    """

    depth: int
    deep_layers: int = 0
    """To how many first layers of the language model features are added."""
    turns_by_axes = False
    """Whether the language model rotates an image's tokens by frame, row and column."""

    def begin(self, patches: mx.array, grid: tuple[int, int, int]) -> TowerState:
        """Return the state of an image before the first block.

        `patches` `[patches, numbers]` are what the processor made of this image. `grid` is its frames, rows and columns
        of patches. Raises ValueError if the two do not fit each other or the tower.
        """
        raise NotImplementedError

    def step(self, state: TowerState) -> None:
        """Take an image through its next block. Raises IndexError after the last one."""
        raise NotImplementedError

    def finish(self, state: TowerState) -> tuple[mx.array, list[mx.array]]:
        """Return an image's features `[tokens, out_hidden]`, which replace the embeddings of its tokens, and a list of
        deepstack features of the same shape. The i-th of them is added to the states of these tokens after layer i of
        the language model. Raises ValueError before the last block.
        """
        raise NotImplementedError

    def check_finished(self, state: TowerState) -> None:
        """Raise ValueError before the last block."""
        if state.next_block < self.depth:
            raise ValueError(f"the image is through {state.next_block} of {self.depth} blocks")

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(array.nbytes for _, array in tree_flatten(self.parameters()))


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, frames: int = 1, scale: float | None = None
) -> mx.array:
    """Return the attention `[patches, heads * dim]` of patches `[patches, heads, dim]` among those of their frame.
    `scale` is the factor of products; None: `dim ** -0.5`.
    """
    patches, count_heads, dim = queries.shape
    scale = dim**-0.5 if scale is None else scale
    padding = next((fused - dim for fused in FUSED_DIMS if fused >= dim), 0)
    queries, keys, values = (  # [frames, heads, patches of a frame, dim]
        mx.pad(heads.reshape(frames, -1, count_heads, dim).transpose(0, 2, 1, 3), [(0, 0)] * 3 + [(0, padding)])
        for heads in (queries, keys, values)
    )
    is_fused = dim + padding in FUSED_DIMS and mx.default_device() != mx.cpu
    count = patches if is_fused else max(MAX_SCORES // (patches * count_heads), 1)
    parts = []
    for at in range(0, patches // frames, count):
        query_part = queries[:, :, at : at + count]
        parts.append(mx.fast.scaled_dot_product_attention(query_part, keys, values, scale=scale))
        if count < patches // frames:
            EVALUATE.get()(parts)  # MLX would allocate the scores of all parts before it computes the first
    return mx.concatenate(parts, axis=2)[..., :dim].transpose(0, 2, 1, 3).reshape(patches, count_heads * dim)


def rotate_pairs(heads: mx.array, cosine: mx.array, sine: mx.array) -> mx.array:
    """Return heads `[patches, heads, dim]` rotated in float32. The two numbers of a pair are half the dimension apart;
    the first half of the pairs turns by rows, and the second by columns.
    """
    first, second = mx.split(heads.astype(mx.float32), 2, axis=-1)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return mx.concatenate(rotated, axis=-1).astype(heads.dtype)


def load_tower(
    folder: Path,
    config: Mapping[str, Any],
    prefix: re.Pattern[str],
    make_tower: Callable[[], Tower],
    kernel: str | None,
    model_dtype: mx.Dtype,
    keep_packed: bool,
) -> Any:
    """Read the tensors in `folder` whose names begin as `prefix` says, into the tower that `make_tower` makes without
    weights. Evaluate it on this thread. Return None if there are none. `kernel` is the name of its convolution's,
    None without one.

    The tower computes in `model_dtype`. Its layers stay packed as they are stored, but not without `keep_packed`.

    Raises ModelCorrupt if tensors are missing, damaged or of other shapes. Raises ModelUnsupported for a tower of
    another kind, or with weights that were quantized in another way than MLX's.
    """
    files = find_tensors(folder, lambda name: prefix.match(name) is not None)
    if not files:
        return None
    tower = make_tower()
    stored = {prefix.sub("", name, count=1): name for name in files}
    beginnings = sorted({match[0] for name in files if (match := prefix.match(name))})
    if len(stored) < len(files) or tower.depth > len(files):
        names = "* and ".join(filter(None, beginnings))
        raise ModelCorrupt(
            f"{folder} has {len(files)} tensors of a vision tower, named {names}*, but config.json asks for one tower "
            f"with {tower.depth} blocks. Download the model again."
        )
    beginning = beginnings[0] if len(beginnings) == 1 else ""
    with translate_weight_errors(folder):
        arrays: dict[Path, Any] = {file: mx.load(str(file)) for file in set(files.values())}
        weights = {name: arrays[files[path]][path] for name, path in stored.items()}
        wanted = dict(tree_flatten(tower.parameters()))
        if kernel is not None and kernel in weights and weights[kernel].shape[1:2] == wanted[kernel].shape[-1:]:
            weights[kernel] = weights[kernel].moveaxis(1, -1)  # as makers store it; converters put the channels last
        quantize_head(folder, tower, weights, config.get("quantization") or {}, beginning)
        check_tensors(folder, tower, weights, beginning, "vision tower")
        tower.load_weights(list(weights.items()))
        tower.set_dtype(model_dtype)
        if not keep_packed:
            model_weights.dequantize_layers(tower)
        EVALUATE.get()([mx.random.state, tower.parameters()])  # the state: see `_evaluate` of `load`
    return tower
