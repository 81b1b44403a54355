"""The vision tower of Pixtral, and the projectors of Pixtral and Mistral 3 behind it.

transformers' `modeling_pixtral`, `modeling_mistral3` and `modeling_llava` and mlx-vlm's `pixtral` and `mistral3` agree
on the computation, but mlx-vlm knows only SiLU inside the tower. Tokens of an image turn by their index, as text does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from cortexmlx.errors import ModelUnsupported
from cortexmlx.vision.towers import Block, Pieces, Tower, count_weights, in_pieces, load_tower, rotate_pairs

TOWER_MODELS = ("mistral3", "pixtral", "llava")
"""The `model_type` of models whose checkpoints have this tower; `llava` also has others."""

_PREFIX = re.compile(r"(?:model\.)?(?:vision_tower\.(?:vision_model\.)?|(?=multi_modal_projector\.))")
"""How names begin: `model.` in transformers' models of today, `vision_tower.vision_model.` in mlx-vlm's. Of the
projector's names, more stays than of the tower's.
"""

_ACTIVATIONS = {"silu": nn.silu, "gelu": nn.gelu}


@dataclass(frozen=True)
class PixtralConfig:
    """The sizes of a tower and of its projector, named as in config.json's `vision_config` and in config.json itself.
    The defaults are those of settings that `vision_config` may leave out.

    A patch is `patch_size` pixels wide and high. A token is `spatial_merge_size` patches wide and high; 0: the
    projector has no merger, and a token is a patch. `out_hidden_size` is the width of the language model, and
    `norm_eps` belongs to the projector's norm.
    """

    out_hidden_size: int
    spatial_merge_size: int
    projector_bias: bool
    norm_eps: float
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_channels: int = 3
    patch_size: int = 16
    hidden_act: str = "gelu"
    rope_theta: float = 10000.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PixtralConfig:
        """Return the sizes that a config.json states. Raises ModelUnsupported if it asks for another computation."""
        vision, text, merges = config["vision_config"], config.get("text_config"), config["model_type"] == "mistral3"
        text = text if isinstance(text, Mapping) else {}
        rope = vision.get("rope_parameters")
        stated = {each.name: vision.get(each.name, each.default) for each in fields(cls)[4:]}
        stated |= {"rope_theta": rope.get("rope_theta", 10000.0)} if isinstance(rope, Mapping) else {}
        stated |= {"out_hidden_size": text.get("hidden_size"), "norm_eps": text.get("rms_norm_eps", 1e-5)}
        stated |= {"spatial_merge_size": config.get("spatial_merge_size", 2) if merges else 0}
        stated |= {"projector_bias": config.get("multimodal_projector_bias", not merges)}
        counts = {each.name: stated[each.name] for each in fields(cls) if each.type == "int"}
        wrong = {name: value for name, value in counts.items() if type(value) is not int or not 0 <= value < 1 << 16}
        if not wrong:
            width, heads = stated["hidden_size"], max(stated["num_attention_heads"], 1)
            known = {name: value > 0 for name, value in counts.items()} | {
                "hidden_size": width > 0 == width % (4 * heads),
                "hidden_act": stated["hidden_act"] in _ACTIVATIONS,
                "rope_theta": isinstance(stated["rope_theta"], (int, float)) and stated["rope_theta"] > 0,
                "head_dim": vision.get("head_dim") in (None, width // heads),
                "projector_hidden_act": config.get("projector_hidden_act", "gelu") == "gelu",
                "vision_feature_layer": config.get("vision_feature_layer", -1) in (-1, stated["num_hidden_layers"]),
                "vision_feature_select_strategy": config.get("vision_feature_select_strategy", "full") == "full",
                "spatial_merge_size": merges <= stated["spatial_merge_size"] <= 16,
            }
            asked = stated | vision | config
            wrong = {name: asked.get(name) for name, is_known in known.items() if not is_known}
        if wrong:
            values = ", ".join(f"{name} {value!r}" for name, value in wrong.items())
            raise ModelUnsupported(f"the vision_config in config.json has {values}: no tower with that is known")
        return cls(**stated)


class PixtralTower(Tower):
    """Pixtral's vision tower with its projector."""

    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        self.config, self.depth = config, config.num_hidden_layers
        kernel = config.patch_size, config.patch_size
        self.patch_conv = nn.Conv2d(config.num_channels, config.hidden_size, kernel, bias=False)
        self.ln_pre = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.transformer = nn.Module()
        self.transformer.layers = [_Block(config) for _ in range(self.depth)]
        self.multi_modal_projector = _Projector(config)

    def begin(self, patches: mx.array, grid: tuple[int, int, int]) -> Pieces:
        """Begin to compute an image's features. `patches` `[patches, channels * size * size]` are cut from its
        `pixel_values` from the processor, row by row.
        """
        _, rows, columns = grid
        merge, weight = max(self.config.spatial_merge_size, 1), self.patch_conv.weight.moveaxis(3, 1).flatten(1)
        wanted = rows * columns, weight.shape[1]
        if min(grid) < 1 or grid[0] > 1 or rows % merge or columns % merge or patches.shape != wanted:
            raise ValueError(
                f"patches of the shape {patches.shape} for a grid of {grid[0]} x {rows} x {columns}: rows and columns "
                f"are multiples of {merge}, and a patch has {weight.shape[1]} numbers"
            )
        row, column = np.indices((rows, columns)).reshape(2, -1, 1)
        half = self.config.hidden_size // self.config.num_attention_heads // 2
        rates = self.config.rope_theta ** (-np.arange(half) / half)
        angles = np.concatenate([row * rates[::2], column * rates[1::2]], axis=1).astype(np.float32)
        turns = mx.array(angles[:, None])
        embed_patches = lambda patches: self.ln_pre(patches.astype(weight.dtype) @ weight.T)  # noqa: E731
        hidden = yield from in_pieces(embed_patches, weight.size, patches)  # patches do not overlap: a product
        return hidden, mx.cos(turns), mx.sin(turns)

    def block(self, number: int) -> Block:
        block: Block = self.transformer.layers[number]
        return block

    def finish(self, hidden: mx.array, grid: tuple[int, int, int], merger: nn.Module | None = None) -> Pieces:
        """Return the features, `[tokens, width]`. After each row come zeros, for the token in the text that ends it."""
        merge, projector = max(self.config.spatial_merge_size, 1), self.multi_modal_projector
        rows, columns = grid[1] // merge, grid[2] // merge
        joined = hidden.reshape(rows, merge, columns, merge, -1).transpose(0, 2, 1, 3, 4)
        tokens = joined.reshape(rows * columns, merge**2, -1)
        features = yield from in_pieces(projector, count_weights(projector), tokens)
        return mx.pad(features.reshape(rows, columns, -1), [(0, 0), (0, 1), (0, 0)]).flatten(0, 1)


class _Block(Block):
    """A block of the tower: attention among the patches and a gated MLP, each with a norm before it."""

    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self._heads, self._activate = config.num_attention_heads, _ACTIVATIONS[config.hidden_act]
        self.attention_norm = nn.RMSNorm(size, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(size, eps=1e-5)
        self.attention, self.feed_forward = nn.Module(), nn.Module()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self.attention, name, nn.Linear(size, size, bias=False))
        self.feed_forward.gate_proj = nn.Linear(size, inner, bias=False)
        self.feed_forward.up_proj = nn.Linear(size, inner, bias=False)
        self.feed_forward.down_proj = nn.Linear(inner, size, bias=False)

    def project(self, hidden: mx.array, cosine: mx.array, sine: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        normed, layer = self.attention_norm(hidden), self.attention
        projections = layer.q_proj, layer.k_proj, layer.v_proj
        queries, keys, values = (project(normed).reshape(len(normed), self._heads, -1) for project in projections)
        queries, keys = (rotate_pairs(heads, cosine, sine) for heads in (queries, keys))
        return queries, keys, values

    def complete(self, hidden: mx.array, attended: mx.array) -> mx.array:
        hidden, mlp = hidden + self.attention.o_proj(attended), self.feed_forward
        normed = self.ffn_norm(hidden)
        output: mx.array = hidden + mlp.down_proj(self._activate(mlp.gate_proj(normed)) * mlp.up_proj(normed))
        return output


class _Projector(nn.Module):  # type: ignore[misc]
    """Merges the neighbouring patches of a token, if there is a merger, and projects to the language model's width."""

    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        size, out = config.hidden_size, config.out_hidden_size
        self._merge = config.spatial_merge_size
        if self._merge:
            self.norm = nn.RMSNorm(size, eps=config.norm_eps)
            self.patch_merger = nn.Module()
            self.patch_merger.merging_layer = nn.Linear(size * self._merge**2, size, bias=False)
        self.linear_1 = nn.Linear(size, out, bias=config.projector_bias)
        self.linear_2 = nn.Linear(out, out, bias=config.projector_bias)

    def __call__(self, patches: mx.array) -> mx.array:
        """Return features `[tokens, out]`, from states `[tokens, patches, hidden]`."""
        states = patches.flatten(1)
        if self._merge:  # of each channel, all patches of the token
            states = self.patch_merger.merging_layer(self.norm(patches).swapaxes(1, 2).flatten(1))
        output: mx.array = self.linear_2(nn.gelu(self.linear_1(states)))
        return output


def read_tower(
    folder: Path, config: Mapping[str, Any], model_dtype: mx.Dtype, *, keep_packed: bool = True
) -> PixtralTower | None:
    """Read the vision tower in `folder`, whose config.json is `config`: see `load_tower`. Return None for a model
    without one, or without its tensors. Raises ModelCorrupt and ModelUnsupported.
    """
    vision_config = config.get("vision_config")
    if isinstance(vision_config, Mapping) and vision_config.get("model_type", "pixtral") != "pixtral":
        return None
    make = lambda: PixtralTower(PixtralConfig.from_config(config))  # noqa: E731
    tower: PixtralTower | None = load_tower(
        folder, config, _PREFIX, make, "patch_conv.weight", model_dtype, keep_packed
    )
    return tower
