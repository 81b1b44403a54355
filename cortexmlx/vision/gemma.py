"""The vision towers of Gemma 4 and Gemma 3, with what brings their features into the language model.

Both average squares of patches to tokens. Gemma 4 keeps an image's sides, adds a learned position for its column and
one for its row, rotates by both, and bounds what its layers read and write in some sizes. Gemma 3 has SigLIP's tower,
for square images of one size. Gemma 4's 12B (`gemma4_unified`) projects a token's pixels at once.

The language models multiply embeddings by a factor, but not features of images: those are divided by it here.

transformers' `modeling_gemma4`, `modeling_gemma4_unified`, `modeling_gemma3` and `modeling_siglip`, and mlx-vlm's
classes for the three types, agree on the computation. mlx-vlm pools in the model's type, transformers and this in
float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from cortexmlx.errors import ModelUnsupported
from cortexmlx.types.images import BidirectionalLayers
from cortexmlx.vision.towers import Block, Pieces, Tower, count_weights, in_pieces, load_tower

_PREFIX = re.compile(
    r"(?:model\.)?(?:vision_embedder\.|vision_tower\.(?:vision_model\.)?|(?=(?:embed_vision|multi_modal_projector)\.))"
)
"""How names begin. SigLIP's have `vision_model` in older checkpoints."""

_SIZES_4 = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10240,
}
_SIZES_UNIFIED = {"patch_size": 16, "pooling_kernel_size": 3, "mm_embed_dim": 3840, "mm_posemb_size": 1120}
_SIZES_3 = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "patch_size": 16,
    "image_size": 224,
}
"""The sizes under the names of config.json's `vision_config`, with transformers' defaults."""


def read_tower(
    folder: Path, config: Mapping[str, Any], model_dtype: mx.Dtype, *, keep_packed: bool = True
) -> Tower | None:
    """Read the vision tower in `folder`, whose config.json is `config`: see `load_tower`. Return None for a model
    without one, or without its tensors. Raises ModelCorrupt and ModelUnsupported.
    """
    kind = TOWERS[config["model_type"]]
    kernel = "embeddings.patch_embedding.weight" if kind is Gemma3Tower else None
    tower: Tower | None = load_tower(folder, config, _PREFIX, lambda: kind(config), kernel, model_dtype, keep_packed)
    return tower


def bidirectional_layers(config: Mapping[str, Any]) -> BidirectionalLayers:
    """Return the layers of the language model in which an image's tokens attend to its later ones, too: all in Gemma 3,
    those with a window in larger models of Gemma 4, none in smaller ones. transformers (by
    `create_masks_for_vision_model`) and vLLM do the same; mlx-vlm does it in all layers of Gemma 4.
    """
    if config.get("model_type") == "gemma3":
        return BidirectionalLayers.ALL
    stated = (config.get("text_config") or {}).get("use_bidirectional_attention")
    return BidirectionalLayers.WINDOWED if stated == "vision" else BidirectionalLayers.NONE


class Gemma4Tower(Tower):
    """Gemma 4's vision tower. Images have various sizes: any rows and columns of patches that fill whole tokens."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        vision, width = config["vision_config"], _text_width(config)
        sizes = _read_sizes(vision, _SIZES_4)
        rope = vision.get("rope_parameters") or {}
        _check_supported(
            vision,
            num_key_value_heads=sizes["num_key_value_heads"] == sizes["num_attention_heads"],
            head_dim=sizes["head_dim"] % 4 == 0,
            rope_parameters=rope.get("rope_type", "axial") in ("axial", "default"),
            hidden_activation=vision.get("hidden_activation", "gelu_pytorch_tanh") == "gelu_pytorch_tanh",
        )
        hidden, self.depth, self._eps = sizes["hidden_size"], sizes["num_hidden_layers"], _read_epsilon(vision)
        self._scale, self._pool, self._dim = width**0.5, sizes["pooling_kernel_size"], sizes["head_dim"]
        self._theta, self._numbers = float(rope.get("rope_theta", 100.0)), 3 * sizes["patch_size"] ** 2
        self.patch_embedder = nn.Module()
        self.patch_embedder.input_proj = nn.Linear(self._numbers, hidden, bias=False)
        self.patch_embedder.position_embedding_table = mx.zeros((2, sizes["position_embedding_size"], hidden))
        self.encoder = nn.Module()
        clips = bool(vision.get("use_clipped_linears"))
        self.encoder.layers = [_Block4(sizes, self._eps, clips) for _ in range(self.depth)]
        if vision.get("standardize"):
            self.std_bias, self.std_scale = mx.zeros((hidden,)), mx.ones((hidden,))
        self.embed_vision = nn.Module()
        self.embed_vision.embedding_projection = nn.Linear(hidden, width, bias=False)

    def begin(self, patches: mx.array, grid: tuple[int, int, int]) -> Pieces:
        """Begin to compute an image's features. `patches` `[patches, size * size * channels]` are pixels from 0 to 1,
        row by row.
        """
        table = self.patch_embedder.position_embedding_table
        _check_patches(patches, grid, self._pool, self._numbers, table.shape[1])
        row, column = np.indices(grid[1:], np.int32).reshape(2, -1)

        def embed_patches(patches: mx.array, row: mx.array, column: mx.array) -> Any:
            hidden = self.patch_embedder.input_proj((2 * (patches - 0.5)).astype(table.dtype))
            return hidden + table[0, column] + table[1, row]

        weights = count_weights(self.patch_embedder)
        hidden = yield from in_pieces(embed_patches, weights, patches, mx.array(row), mx.array(column))
        quarter = self._dim // 4
        rates = self._theta ** (-np.arange(quarter) / quarter)
        turns = mx.array((np.stack([column, row], axis=1)[..., None] * rates)[:, None].astype(np.float32))
        return hidden, mx.cos(turns), mx.sin(turns)

    def block(self, number: int) -> Block:
        block: Block = self.encoder.layers[number]
        return block

    def finish(self, hidden: mx.array, grid: tuple[int, int, int], merger: nn.Module | None = None) -> Pieces:
        pooled = _pool(hidden, grid[2], self._pool).astype(mx.float32) * hidden.shape[1] ** 0.5
        if "std_bias" in self:
            pooled = (pooled - self.std_bias.astype(mx.float32)) * self.std_scale.astype(mx.float32)
        return (yield from _project_tokens(self.embed_vision, pooled.astype(hidden.dtype), self._eps, self._scale))


class UnifiedTower(Tower):
    """What Gemma 4's 12B has instead of a tower: a projection of each image token's pixels, without attention."""

    depth = 0

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        vision, width = config["vision_config"], _text_width(config)
        sizes = _read_sizes(vision, _SIZES_UNIFIED)
        self._patch, self._pool, hidden = sizes["patch_size"], sizes["pooling_kernel_size"], sizes["mm_embed_dim"]
        self._scale, self._eps, numbers = width**0.5, _read_epsilon(vision), 3 * (self._patch * self._pool) ** 2
        self.patch_ln1, self.patch_dense = nn.LayerNorm(numbers), nn.Linear(numbers, hidden)
        self.patch_ln2, self.pos_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.pos_embedding = mx.zeros((sizes["mm_posemb_size"], 2, hidden))
        self.embed_vision = nn.Module()
        self.embed_vision.embedding_projection = nn.Linear(hidden, width, bias=False)

    def begin(self, patches: mx.array, grid: tuple[int, int, int]) -> Pieces:
        """Begin to compute an image's features, from the same patches as in `Gemma4Tower`."""
        size, pool = self._patch, self._pool
        _check_patches(patches, grid, pool, 3 * size**2, pool * self.pos_embedding.shape[0])
        rows, columns, nothing = grid[1] // pool, grid[2] // pool, mx.zeros(0)
        cut = patches.reshape(rows, pool, columns, pool, size, size, 3).transpose(0, 2, 1, 4, 3, 5, 6)
        pixels = cut.reshape(rows * columns, -1).astype(self.pos_embedding.dtype)
        row, column = (mx.array(each) for each in np.indices((rows, columns), np.int32).reshape(2, -1))

        def embed(pixels: mx.array, row: mx.array, column: mx.array) -> Any:
            hidden = self.patch_ln2(self.patch_dense(self.patch_ln1(pixels)))
            return self.pos_norm(hidden + self.pos_embedding[column, 0] + self.pos_embedding[row, 1])

        return (yield from in_pieces(embed, count_weights(self.patch_dense), pixels, row, column)), nothing, nothing

    def finish(self, hidden: mx.array, grid: tuple[int, int, int], merger: nn.Module | None = None) -> Pieces:
        return (yield from _project_tokens(self.embed_vision, hidden, self._eps, self._scale))


class _Block4(Block):
    """A block of Gemma 4's tower: attention among all patches and a gated MLP, each with a norm before and after it."""

    scale = 1.0

    def __init__(self, sizes: Mapping[str, int], eps: float, clips: bool) -> None:
        super().__init__()
        size, inner = sizes["hidden_size"], sizes["intermediate_size"]
        self._heads, self._dim, self._eps = sizes["num_attention_heads"], sizes["head_dim"], eps
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            self[f"{name}_layernorm"] = nn.RMSNorm(size, eps)
        attention, self.mlp = nn.Module(), nn.Module()
        for name in "qkv":
            attention[f"{name}_proj"] = _BoundedLinear(size, self._heads * self._dim, clips)
        attention.o_proj = _BoundedLinear(self._heads * self._dim, size, clips)
        attention.q_norm, attention.k_norm = nn.RMSNorm(self._dim, eps), nn.RMSNorm(self._dim, eps)
        self.self_attn = attention
        self.mlp.gate_proj, self.mlp.up_proj = (_BoundedLinear(size, inner, clips) for _ in range(2))
        self.mlp.down_proj = _BoundedLinear(inner, size, clips)

    def complete(self, hidden: mx.array, attended: mx.array) -> mx.array:
        hidden = hidden + self.post_attention_layernorm(self.self_attn.o_proj(attended))
        normed = self.pre_feedforward_layernorm(hidden)
        inside = self.mlp.down_proj(nn.gelu_approx(self.mlp.gate_proj(normed)) * self.mlp.up_proj(normed))
        output: mx.array = hidden + self.post_feedforward_layernorm(inside)
        return output

    def project(self, hidden: mx.array, cosine: mx.array, sine: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        hidden = self.input_layernorm(hidden)
        own, shape = self.self_attn, (len(hidden), self._heads, self._dim)
        queries = _rotate(own.q_norm(own.q_proj(hidden).reshape(shape)), cosine, sine)
        keys = _rotate(own.k_norm(own.k_proj(hidden).reshape(shape)), cosine, sine)
        values = mx.fast.rms_norm(own.v_proj(hidden).reshape(shape), None, self._eps)
        return queries, keys, values


class _BoundedLinear(nn.Module):  # type: ignore[misc]
    """A linear layer that, with `clips`, clips its inputs and outputs to bounds from the checkpoint."""

    def __init__(self, size: int, out: int, clips: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(size, out, bias=False)
        if clips:
            self.input_min, self.output_min = mx.array(-np.inf), mx.array(-np.inf)
            self.input_max, self.output_max = mx.array(np.inf), mx.array(np.inf)

    def __call__(self, states: mx.array) -> mx.array:
        if "input_min" not in self:
            plain: mx.array = self.linear(states)
            return plain
        bounded = mx.clip(states, self.input_min, self.input_max)
        return mx.clip(self.linear(bounded), self.output_min, self.output_max)


def _rotate(heads: mx.array, cosine: mx.array, sine: mx.array) -> mx.array:
    """Return heads `[patches, heads, dim]` rotated in float32: the first half by column, the second by row. The two
    numbers of a rotated pair are `dim / 4` apart.
    """
    first, second = mx.split(heads.astype(mx.float32).reshape(*heads.shape[:2], 2, 2, -1), 2, axis=3)
    first, second = first[..., 0, :], second[..., 0, :]
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return mx.stack(rotated, axis=3).reshape(heads.shape).astype(heads.dtype)


class Gemma3Tower(Tower):
    """SigLIP's tower with Gemma 3's projector. An image is a square of tokens, and each token a square of patches."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        vision, width = config["vision_config"], _text_width(config)
        sizes = _read_sizes(vision, _SIZES_3)
        hidden, self._side = sizes["hidden_size"], sizes["image_size"] // sizes["patch_size"]
        tokens = int(config.get("mm_tokens_per_image", 256) ** 0.5)
        _check_supported(
            vision | {"mm_tokens_per_image": config.get("mm_tokens_per_image")},
            num_attention_heads=hidden % sizes["num_attention_heads"] == 0,
            mm_tokens_per_image=0 < tokens <= self._side and self._side % tokens == 0,
            hidden_act=vision.get("hidden_act", "gelu_pytorch_tanh") == "gelu_pytorch_tanh",
        )
        eps, self.depth = _read_epsilon(vision, "layer_norm_eps"), sizes["num_hidden_layers"]
        self._eps, self._pool, self._patch = eps, self._side // tokens, sizes["patch_size"]
        self._scale = mx.array(width**0.5, mx.bfloat16)  # mlx-lm's class rounds it
        self.embeddings = nn.Module()
        self.embeddings.patch_embedding = nn.Conv2d(3, hidden, self._patch, self._patch)
        self.embeddings.position_embedding = nn.Embedding(self._side**2, hidden)
        self.encoder = nn.Module()
        self.encoder.layers = [_Block3(sizes, eps) for _ in range(self.depth)]
        self.post_layernorm = nn.LayerNorm(hidden, eps)
        self.multi_modal_projector = nn.Module()
        self.multi_modal_projector.mm_input_projection_weight = mx.zeros((hidden, width))
        self.multi_modal_projector.mm_soft_emb_norm = nn.RMSNorm(hidden, eps)

    def begin(self, patches: mx.array, grid: tuple[int, int, int]) -> Pieces:
        """Begin to compute an image's features. `patches` `[tokens, size * size * channels]` are the pixels of each
        token, row by row.
        """
        embed, size = self.embeddings.patch_embedding, self._patch
        side = self._side // self._pool
        _check_patches(patches, grid, 1, 3 * (size * self._pool) ** 2, side)
        cut = patches.reshape(side, side, self._pool, size, self._pool, size, 3).transpose(0, 2, 1, 4, 3, 5, 6)
        pixels, nothing = cut.reshape(self._side**2, -1).astype(embed.weight.dtype), mx.zeros(0)

        def embed_patches(pixels: mx.array, positions: mx.array) -> Any:
            projected = pixels @ embed.weight.flatten(1).T + embed.bias
            return projected + self.embeddings.position_embedding(positions)

        hidden = yield from in_pieces(embed_patches, embed.weight.size, pixels, mx.arange(self._side**2))
        return hidden, nothing, nothing

    def block(self, number: int) -> Block:
        block: Block = self.encoder.layers[number]
        return block

    def finish(self, hidden: mx.array, grid: tuple[int, int, int], merger: nn.Module | None = None) -> Pieces:
        own = self.multi_modal_projector
        weight = own.mm_input_projection_weight

        def project_pooled(pooled: mx.array) -> Any:
            seen = mx.fast.rms_norm(pooled, 1 + own.mm_soft_emb_norm.weight, self._eps) @ weight
            return seen / self._scale.astype(weight.dtype)

        pooled = _pool(self.post_layernorm(hidden), self._side, self._pool)
        return (yield from in_pieces(project_pooled, weight.size, pooled))


class _Block3(Block):
    """A block of Gemma 3's tower: attention among all patches and an MLP, each with a norm before it."""

    def __init__(self, sizes: Mapping[str, int], eps: float) -> None:
        super().__init__()
        size, inner = sizes["hidden_size"], sizes["intermediate_size"]
        self._heads = sizes["num_attention_heads"]
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(size, eps), nn.LayerNorm(size, eps)
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            self.self_attn[name] = nn.Linear(size, size)
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(size, inner), nn.Linear(inner, size)

    def project(self, hidden: mx.array, cosine: mx.array, sine: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        own, normed = self.self_attn, self.layer_norm1(hidden)
        parts = own.q_proj, own.k_proj, own.v_proj
        queries, keys, values = (part(normed).reshape(len(normed), self._heads, -1) for part in parts)
        return queries, keys, values

    def complete(self, hidden: mx.array, attended: mx.array) -> mx.array:
        hidden = hidden + self.self_attn.out_proj(attended)
        output: mx.array = hidden + self.mlp.fc2(nn.gelu_approx(self.mlp.fc1(self.layer_norm2(hidden))))
        return output


def _project_tokens(part: nn.Module, states: mx.array, eps: float, scale: float) -> Pieces:
    """Project the states of image tokens to embeddings, divided by `scale`, by which the language model multiplies."""
    make = lambda states: part.embedding_projection(mx.fast.rms_norm(states, None, eps)) / scale  # noqa: E731
    return (yield from in_pieces(make, count_weights(part), states))


TOWERS: dict[str, Callable[[Mapping[str, Any]], Tower]] = {
    "gemma4": Gemma4Tower,
    "gemma4_unified": UnifiedTower,
    "gemma3": Gemma3Tower,
}
"""By the `model_type` of config.json."""


def _pool(hidden: mx.array, columns: int, side: int) -> mx.array:
    """Return the mean of each square of `side` x `side` patches: computed in float32, returned in the tower's type."""
    squares = hidden.astype(mx.float32).reshape(-1, side, columns // side, side, hidden.shape[1])
    return squares.mean(axis=(1, 3)).reshape(-1, hidden.shape[1]).astype(hidden.dtype)


def _check_patches(patches: mx.array, grid: tuple[int, int, int], unit: int, numbers: int, most: int) -> None:
    """Raise ValueError unless patches are `[rows * columns, numbers]`: multiples of `unit`, at most `most` a side."""
    frames, rows, columns = grid
    wanted = rows * columns, numbers
    if frames != 1 or min(grid) < 1 or rows % unit or columns % unit or max(rows, columns) > most:
        raise ValueError(f"a grid of {frames} x {rows} x {columns}: rows and columns are multiples of {unit} to {most}")
    if patches.shape != wanted:
        raise ValueError(f"patches of the shape {patches.shape} for a grid of {rows} x {columns}: it must be {wanted}")


def _text_width(config: Mapping[str, Any]) -> int:
    """Return the width of the language model's embeddings."""
    return _read_sizes(config.get("text_config") or {}, {"hidden_size": 0})["hidden_size"]


def _read_epsilon(vision: Mapping[str, Any], name: str = "rms_norm_eps") -> float:
    return float(vision.get(name, 1e-6))


def _read_sizes(stated: Mapping[str, Any], defaults: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes that a part of config.json states. Raises ModelUnsupported."""
    sizes = {name: stated.get(name, default) for name, default in defaults.items()}
    fits = {name: type(value) is int and 0 < value < 1 << 16 for name, value in sizes.items()}
    _check_supported(sizes, **fits)
    return sizes


def _check_supported(stated: Mapping[str, Any], **is_supported: bool) -> None:
    """Raise ModelUnsupported, naming the `stated` values, for the settings whose `is_supported` is false."""
    if wrong := [name for name, supported in is_supported.items() if not supported]:
        values = ", ".join(f"{name} {stated.get(name)!r}" for name in wrong)
        raise ModelUnsupported(f"the vision_config in config.json has {values}: no tower with that is known")
