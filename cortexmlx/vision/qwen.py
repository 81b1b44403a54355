"""The vision tower of Qwen3-VL, Qwen3.5 and Qwen3.6, and the positions of image tokens in their language models.

Only the towers of Qwen3-VL have deepstack features.

transformers' `modeling_qwen3_vl` and `modeling_qwen3_5`, vLLM's `qwen3_vl` and mlx-vlm's `qwen3_vl` agree on the
computation. For the learned positions, transformers interpolates in float32 as here, the other two in the model's type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from cortexmlx.errors import ModelUnsupported
from cortexmlx.types.arrays import IntArray
from cortexmlx.types.images import PlacedImage
from cortexmlx.vision.towers import Block, Pieces, Tower, count_weights, in_pieces, load_tower, rotate_pairs

TOWER_MODELS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""The `model_type` of models whose checkpoints have this tower."""

_PREFIX = re.compile(r"(?:(?:model|language_model)\.)*(?:visual|vision_tower)\.")
"""How names begin: `model.visual.` in transformers' models, `visual.` in vLLM's, `vision_tower.` in mlx-vlm's. mlx-vlm
also reads `model.language_model.visual.`.
"""

_THETA = 10000.0
"""The base of the rotation by rows and columns."""


@dataclass(frozen=True)
class TowerConfig:
    """The sizes of a tower, under the names of config.json's `vision_config`.

    A patch is `patch_size` pixels wide and high, in `temporal_patch_size` frames: the processor repeats an image. A
    token is `spatial_merge_size` patches wide and high. `out_hidden_size` is the width of the language model. The
    learned positions are a square grid. Deepstack features are taken after the blocks `deepstack_visual_indexes`.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    out_hidden_size: int
    num_position_embeddings: int
    in_channels: int = 3
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    deepstack_visual_indexes: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TowerConfig:
        """Return the sizes that a `vision_config` states. Raises ModelUnsupported if it lacks one, or asks for another
        computation.
        """
        stated = {each.name: config.get(each.name, each.default) for each in fields(cls)}
        layers = stated.pop("deepstack_visual_indexes") or ()
        layers = tuple(layers) if isinstance(layers, Sequence) else (layers,)
        wrong = [name for name, value in stated.items() if type(value) is not int or not 0 < value < 1 << 16]
        if not wrong:
            sizes, rope = cls(**stated, deepstack_visual_indexes=layers), config.get("rope_parameters")
            fits = {
                "num_heads": sizes.hidden_size % (4 * sizes.num_heads) == 0,
                "num_position_embeddings": sizes.num_position_embeddings
                == math.isqrt(sizes.num_position_embeddings) ** 2,
                "spatial_merge_size": sizes.spatial_merge_size <= 16,
                "deepstack_visual_indexes": all(layer in range(sizes.depth) for layer in layers),
                "hidden_act": config.get("hidden_act", "gelu_pytorch_tanh") == "gelu_pytorch_tanh",
                "rope_parameters": not isinstance(rope, Mapping) or rope.get("rope_theta", _THETA) == _THETA,
            }
            wrong = [name for name, is_known in fits.items() if not is_known]
        if wrong:
            values = ", ".join(f"{name} {config.get(name)!r}" for name in wrong)
            raise ModelUnsupported(f"the vision_config in config.json has {values}: no tower with that is known")
        return sizes


class VisionTower(Tower):
    """The vision tower of Qwen's models."""

    turns_by_axes = True

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.config, self.depth, self.deep_layers = config, config.depth, len(config.deepstack_visual_indexes)
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv3d(config.in_channels, config.hidden_size, kernel)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = [_Block(config) for _ in range(config.depth)]
        self.merger = _Merger(config, is_norm_after=False)
        if config.deepstack_visual_indexes:
            self.deepstack_merger_list = [_Merger(config, is_norm_after=True) for _ in config.deepstack_visual_indexes]

    def begin(self, patches: mx.array, grid: tuple[int, int, int]) -> Pieces:
        """Begin to compute an image's features. `patches` `[patches, channels * frames * size * size]` are its
        `pixel_values` from the processor: those of one token are neighbours. `grid` is its `image_grid_thw`.
        """
        frames, rows, columns = grid
        merge, embed = self.config.spatial_merge_size, self.patch_embed.proj
        weight = embed.weight.moveaxis(4, 1).flatten(1)  # patches do not overlap, so the convolution is a product
        wanted = frames * rows * columns, weight.shape[1]
        if min(grid) < 1 or rows % merge or columns % merge or patches.shape != wanted:
            raise ValueError(
                f"patches of the shape {patches.shape} for a grid of {frames} x {rows} x {columns}: rows and columns "
                f"are multiples of {merge}, and a patch has {weight.shape[1]} numbers"
            )
        indices = np.indices((rows, columns), np.int32).reshape(2, rows // merge, merge, columns // merge, merge)
        row, column = indices.transpose(0, 1, 3, 2, 4).reshape(2, -1)
        positions = self._interpolate_positions(rows, columns)[mx.array(row), mx.array(column)]
        positions = mx.tile(positions.astype(weight.dtype), (frames, 1))

        def embed_patches(patches: mx.array, positions: mx.array) -> Any:
            return patches.astype(weight.dtype) @ weight.T + embed.bias + positions

        hidden = yield from in_pieces(embed_patches, weight.size, patches, positions)
        quarter = self.config.hidden_size // self.config.num_heads // 4
        rates = _THETA ** (-np.arange(quarter) / quarter)
        angles = np.concatenate([row[:, None] * rates, column[:, None] * rates], axis=1).astype(np.float32)
        turns = mx.array(np.tile(angles, (frames, 1))[:, None])
        return hidden, mx.cos(turns), mx.sin(turns)

    def block(self, number: int) -> Block:
        block: Block = self.blocks[number]
        return block

    def deep_merger(self, number: int) -> nn.Module | None:
        layers = self.config.deepstack_visual_indexes
        return self.deepstack_merger_list[layers.index(number)] if number in layers else None

    def finish(self, hidden: mx.array, grid: tuple[int, int, int], merger: nn.Module | None = None) -> Pieces:
        merger, joined = merger or self.merger, hidden.reshape(-1, self.config.spatial_merge_size**2, hidden.shape[1])
        return (yield from in_pieces(merger, count_weights(merger), joined))

    def _interpolate_positions(self, rows: int, columns: int) -> mx.array:
        """Return the learned positions, interpolated from corner to corner: `[rows, columns, hidden]` float32."""
        side = math.isqrt(self.config.num_position_embeddings)
        grid: mx.array = self.pos_embed(mx.arange(side * side)).astype(mx.float32).reshape(side, side, -1)
        for axis, size in enumerate((rows, columns)):
            source = np.arange(size) * ((side - 1) / max(size - 1, 1))
            low = source.astype(np.int32)
            high = np.minimum(low + 1, side - 1)
            share = mx.array((source - low).astype(np.float32)).reshape([-1 if axis == i else 1 for i in range(3)])
            taps = (mx.take(grid, mx.array(tap), axis=axis) for tap in (low, high))
            grid = next(taps) * (1 - share) + next(taps) * share
        return grid


class _Block(Block):
    """A block of the tower: attention among the patches of a frame and an MLP, each with a norm before it."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm1 = nn.LayerNorm(size, eps=1e-6)
        self.norm2 = nn.LayerNorm(size, eps=1e-6)
        self._heads, self.attn = config.num_heads, nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = _MLP(size, config.intermediate_size, size, nn.gelu_approx)

    def project(self, hidden: mx.array, cosine: mx.array, sine: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        patches, size = hidden.shape
        heads = self.attn.qkv(self.norm1(hidden)).reshape(patches, 3 * self._heads, size // self._heads)
        queries, keys, values = mx.split(heads, 3, axis=1)
        queries, keys = (rotate_pairs(each, cosine, sine) for each in (queries, keys))
        return queries, keys, values

    def complete(self, hidden: mx.array, attended: mx.array) -> mx.array:
        hidden = hidden + self.attn.proj(attended)
        output: mx.array = hidden + self.mlp(self.norm2(hidden))
        return output


class _MLP(nn.Module):  # type: ignore[misc]
    def __init__(self, size: int, inner: int, out: int, activate: Callable[[mx.array], mx.array]) -> None:
        super().__init__()
        self._activate = activate
        self.linear_fc1 = nn.Linear(size, inner)
        self.linear_fc2 = nn.Linear(inner, out)

    def __call__(self, states: mx.array) -> mx.array:
        output: mx.array = self.linear_fc2(self._activate(self.linear_fc1(states)))
        return output


class _Merger(_MLP):
    """Merges the neighbouring patches of a token. A merger of deepstack features joins them first, then normalizes."""

    def __init__(self, config: TowerConfig, *, is_norm_after: bool) -> None:
        joined = config.hidden_size * config.spatial_merge_size**2
        super().__init__(joined, joined, config.out_hidden_size, nn.gelu)
        self._joined = joined
        self.norm = nn.LayerNorm(joined if is_norm_after else config.hidden_size, eps=1e-6)

    def __call__(self, states: mx.array) -> mx.array:
        normed = self.norm(states.reshape(-1, self.norm.weight.shape[0]))
        return super().__call__(normed.reshape(-1, self._joined))


def read_tower(
    folder: Path, config: Mapping[str, Any], model_dtype: mx.Dtype, *, keep_packed: bool = True
) -> VisionTower | None:
    """Read the vision tower in `folder`, whose config.json is `config`: see `load_tower`. Return None for a model
    without one, or without its tensors. Raises ModelCorrupt and ModelUnsupported.
    """
    kernel, make = "patch_embed.proj.weight", lambda: VisionTower(TowerConfig.from_config(config["vision_config"]))
    tower: VisionTower | None = load_tower(folder, config, _PREFIX, make, kernel, model_dtype, keep_packed)
    return tower


def rope_positions(length: int, spans: Sequence[PlacedImage]) -> tuple[IntArray, list[int]]:
    """Return the positions `[3, length]` of a prompt's tokens, by frame, row and column, and one delta for each image:
    position minus index of the tokens between that image and the next.

    The three are the same for text. An image of r rows and c columns begins at the next position, and takes max(r, c)
    of them (transformers' `get_rope_index`).

    Raises ValueError if spans overlap, are not in order, or do not lie in the prompt.
    """
    positions = np.tile(np.arange(length, dtype=np.int32), (3, 1))
    deltas: list[int] = []
    end = delta = 0
    for span in spans:
        if not end <= span.start < span.end <= length:
            raise ValueError(f"an image at tokens {span.start} to {span.end} of {length}, the one before ends at {end}")
        grid = np.indices(span.image.merged_grid, dtype=np.int32).reshape(3, -1)
        positions[:, span.start : span.end] = grid + (span.start + delta)
        delta += span.start + max(span.image.merged_grid[1:]) - span.end
        deltas.append(delta)
        end = span.end
        positions[:, end:] = np.arange(end, length, dtype=np.int32) + delta
    return positions, deltas


def rotate(
    x: mx.array, positions: mx.array, sections: tuple[int, int, int], dims: int, rope: Callable[..., mx.array]
) -> mx.array:
    """Return queries or keys `[T, heads, 1, dim]` rotated to `positions` `[3, T]`, in their own type.

    `rope(x, offset=positions)` is the layer's own plain rotation of the first `dims` numbers of a head, such as
    `nn.RoPE(dims, base=theta)`. Where the three positions of a token are equal, the result is the same to the bit.

    Of the pairs 0, 1, 2, 3, ..., every third one from 1 turns by row, and every third one from 2 by column, as many of
    each as `sections` says. All others turn by frame (transformers' `recomposition_frequencies`, vLLM's
    `apply_interleaved_rope`).
    """
    pair = np.arange(x.shape[-1]) % (dims // 2)
    axis = pair % 3  # also of what is behind `dims`, which no rotation changes
    axis[pair >= 3 * np.array(sections)[axis]] = 0
    rotated = rope(x, offset=positions[0])
    for number in (1, 2):
        rotated = mx.where(mx.array(axis == number), rope(x, offset=positions[number]), rotated)
    return rotated
