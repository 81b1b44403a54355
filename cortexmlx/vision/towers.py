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

MAX_SCORES, MAX_FUSED_SCORES = 1 << 25, 1 << 28
"""How many scores a piece of a block has: of so many patches with all others. On a CPU they are in memory, 128 MB in
float32. Where attention is fused, they are not, and they take less time.
"""

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
    heads: tuple[mx.array, ...] = ()
    """Queries, keys and values `[patches, heads, dim]` in the next block, once it has begun."""
    parts: list[mx.array] = field(default_factory=list)
    """What the next block has made so far of the first patches."""
    deepstack: list[mx.array] = field(default_factory=list)
    """Features `[tokens, out_hidden]` of the blocks so far."""

    @property
    def arrays(self) -> list[mx.array]:
        """Return what is left to be computed: evaluate it before the next piece to bound time and memory."""
        return [self.hidden, *self.deepstack, *self.heads, *self.parts]


class Block(nn.Module):  # type: ignore[misc]
    """A block of a tower. Patches meet in its attention only, so it can be computed in pieces."""

    scale: float | None = None
    """The factor of products of queries and keys; None: `dim ** -0.5`."""

    def project(self, state: TowerState) -> tuple[mx.array, mx.array, mx.array]:
        """Return the queries, keys and values of all patches, `[patches, heads, dim]` each."""
        raise NotImplementedError

    def complete(self, hidden: mx.array, attended: mx.array) -> mx.array:
        """Return the next states of some patches, from theirs and what attention gave, `[patches, heads * dim]`."""
        raise NotImplementedError


class Tower(nn.Module):  # type: ignore[misc]
    """Turns the patches of one image into features, the embeddings of its tokens for the language model.

    Call `begin`, then `step` for each of the `depth` blocks, then `finish`; or, for pieces that take less time,
    `advance` until `next_block` is `depth`. Other work may run in between.
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

    def block(self, number: int) -> Block:
        """Return a block. Raises IndexError after the last one."""
        raise NotImplementedError

    def end_block(self, state: TowerState) -> None:
        """Do what comes after the block `next_block`."""

    def step(self, state: TowerState) -> None:
        """Take an image through its next block. Pieces are evaluated if there are several. Raises IndexError after the
        last one.
        """
        number = state.next_block
        while self.advance(state) == number:
            EVALUATE.get()(state.arrays)

    def advance(self, state: TowerState) -> int:
        """Take an image through a piece of its next block, or all of it if it has few patches. Return `next_block`."""
        block, patches = self.block(state.next_block), len(state.hidden)
        begun = bool(state.heads)
        state.heads = state.heads or block.project(state)
        queries, keys, values = state.heads
        most = MAX_FUSED_SCORES if is_fused(queries.shape[2]) else MAX_SCORES
        count = max(most // (patches * queries.shape[1]), 1)
        if not begun and count < patches:
            return state.next_block
        at, frame = sum(map(len, state.parts)), patches // state.grid[0]
        first = at // frame * frame  # patches see each other within a frame
        end = min(at + count, first + frame)
        keys, values = (heads[first : first + frame] for heads in (keys, values))
        attended = attend(queries[at:end], keys, values, block.scale)
        state.parts.append(block.complete(state.hidden[at:end], attended))
        if end == patches:
            state.hidden = mx.concatenate(state.parts) if len(state.parts) > 1 else state.parts[0]
            state.heads, state.parts = (), []
            self.end_block(state)
            state.next_block += 1
        return state.next_block

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


def is_fused(dim: int) -> bool:
    """Whether MLX's attention has a kernel for heads of that dimension, perhaps padded, that keeps no scores."""
    return dim <= FUSED_DIMS[-1] and mx.default_device() != mx.cpu


def attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float | None = None) -> mx.array:
    """Return what patches `[patches, heads, dim]` see of others, `[patches, heads * dim]`. `scale` is the factor of
    products; None: `dim ** -0.5`.
    """
    patches, count_heads, dim = queries.shape
    scale = dim**-0.5 if scale is None else scale
    padding = next((fused - dim for fused in FUSED_DIMS if fused >= dim), 0) if is_fused(dim) else 0
    queries, keys, values = (  # [1, heads, patches, dim]
        mx.pad(heads.swapaxes(0, 1)[None], [(0, 0)] * 3 + [(0, padding)]) if padding else heads.swapaxes(0, 1)[None]
        for heads in (queries, keys, values)
    )
    attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)
    return attended[0, ..., :dim].swapaxes(0, 1).reshape(patches, count_heads * dim)


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
    weights. Evaluate it on this thread. Return None if there are none, or if config.json says nothing of a tower.
    `kernel` is the name of its convolution's, None without one.

    The tower computes in `model_dtype`. Its layers stay packed as they are stored, but not without `keep_packed`.

    Raises ModelCorrupt if tensors are missing, damaged or of other shapes. Raises ModelUnsupported for a tower of
    another kind, or with weights that were quantized in another way than MLX's.
    """
    has_tower = isinstance(config.get("vision_config"), Mapping)
    files = find_tensors(folder, lambda name: prefix.match(name) is not None) if has_tower else {}
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
