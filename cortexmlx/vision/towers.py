"""What the vision towers of all families share: an image's way through it in pieces, attention among its patches, and
how the tensors are read, which mlx-lm's classes drop.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeAlias

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

MAX_PRODUCTS, MAX_FUSED_PRODUCTS = 1 << 30, 1 << 35
"""How many products of two numbers a piece of a tower's work has: 0.02 s of a core of a CPU, 0.13 s where attention is
not fused, whose scores they bound, too, and less on any Apple GPU. Others wait for a piece. The same ones are computed
whatever else runs, so features are the same to the bit.
"""

EVALUATE: ContextVar[Callable[[list[Any]], object]] = ContextVar("EVALUATE", default=mx.eval)
"""Computes arrays. Where nothing shall be computed, it notes them at most: see `execution/sight_memory.py`."""


class Block(nn.Module):  # type: ignore[misc]
    """A transformer block of a tower, computed in pieces of patches around the attention."""

    scale: float | None = None
    """The factor of products of queries and keys; None: `dim ** -0.5`."""

    def project(self, hidden: mx.array, cosine: mx.array, sine: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return the queries, keys and values of some patches, `[patches, heads, dim]` each, from their states and the
        cosines and sines of their angles.
        """
        raise NotImplementedError

    def complete(self, hidden: mx.array, attended: mx.array) -> mx.array:
        """Return the block's output of some patches, from its input and attention's output `[patches, heads * dim]`."""
        raise NotImplementedError


Pieces: TypeAlias = Generator[Sequence[mx.array], None, Any]
"""Work in pieces: it yields arrays that are to be evaluated before it goes on, and returns what it has made of them."""


class Tower(nn.Module):  # type: ignore[misc]
    """Turns the patches of one image into features, the embeddings of its tokens for the language model."""

    depth: int
    deep_layers: int = 0
    """To how many first layers of the language model features are added."""
    turns_by_axes = False
    """Whether the language model rotates an image's tokens by frame, row and column."""

    def see(self, patches: mx.array, grid: tuple[int, int, int], blocks: Sequence[int] | None = None) -> Pieces:
        """Compute an image's features in pieces: see `run_pieces`. Returns features `[tokens, out_hidden]`, which
        replace the embeddings of its tokens, and a list of deepstack features of the same shape. The i-th is added to
        the states of these tokens after layer i of the language model.

        `patches` `[patches, numbers]` are what the processor made of this image. `grid` is its frames, rows and columns
        of patches, which see each other within a frame. `blocks` are those to take it through; None: all. Raises
        ValueError if patches and grid do not fit each other or the tower.
        """
        hidden, cosine, sine = yield from self.begin(patches, grid)
        del patches
        deep = []
        for number in range(self.depth) if blocks is None else blocks:
            hidden = yield from self._apply_block(self.block(number), hidden, cosine, sine, len(hidden) // grid[0])
            if (merger := self.deep_merger(number)) is not None:
                deep.append((yield from self.finish(hidden, grid, merger)))
        return (yield from self.finish(hidden, grid)), deep

    def begin(self, patches: mx.array, grid: tuple[int, int, int]) -> Pieces:
        """Return the states `[patches, hidden]` before the first block, in the tower's type, and the cosines and sines
        of each patch's angles, `[patches, 1, head_dim / 2]` float32.
        """
        raise NotImplementedError

    def block(self, number: int) -> Block:
        """Return a block. Raises IndexError after the last one."""
        raise NotImplementedError

    def deep_merger(self, number: int) -> nn.Module | None:
        """Return the module that makes deepstack features of a block's output; None if the block has none."""
        return None

    def finish(self, hidden: mx.array, grid: tuple[int, int, int], merger: nn.Module | None = None) -> Pieces:
        """Return features from the last block's output, or deepstack features from another one's by its `merger`."""
        raise NotImplementedError

    def _apply_block(self, block: Block, hidden: mx.array, cosine: mx.array, sine: mx.array, frame: int) -> Pieces:
        """Apply a block to the states of an image. `frame` is the number of patches in a frame."""
        weights = count_weights(block)
        queries, *others = yield from in_pieces(block.project, weights, hidden, cosine, sine)
        keys, values = (mx.contiguous(each.swapaxes(0, 1)).swapaxes(0, 1) for each in others)  # once
        dim, parts = queries.shape[2], []
        for first in range(0, len(hidden), frame):
            seen = [each[first : first + frame] for each in (keys, values, queries, hidden)]
            near_keys, near_values, *own = seen

            def attend_all(
                queries: mx.array, hidden: mx.array, keys: mx.array = near_keys, values: mx.array = near_values
            ) -> mx.array:
                return block.complete(hidden, attend(queries, keys, values, block.scale))

            parts.append((yield from in_pieces(attend_all, weights + near_keys.size + near_values.size, *own, dim=dim)))
        return mx.concatenate(parts) if len(parts) > 1 else parts[0]

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(array.nbytes for _, array in tree_flatten(self.parameters()))


def in_pieces(make: Callable[..., Any], numbers: int, *arrays: mx.array, dim: int = 0) -> Pieces:
    """Compute `make(*arrays)`, an array or a tuple, in pieces of some rows, which do not depend on each other.
    `numbers` is how many weights, keys and values multiply a row, and `dim` is the size of attention's heads, or 0.
    """
    count = max((MAX_FUSED_PRODUCTS if is_fused(dim) else MAX_PRODUCTS) // numbers, 1)
    parts: list[Any] = []
    for at in range(0, len(arrays[0]), count):
        made = make(*(array[at : at + count] for array in arrays))
        parts.append(made if isinstance(made, tuple) else (made,))
        yield parts[-1]
    joined = parts[0] if len(parts) == 1 else [mx.concatenate(list(each)) for each in zip(*parts, strict=True)]
    return joined if len(joined) > 1 else joined[0]


def run_pieces(pieces: Pieces, until: float | None = None) -> Any:
    """Compute the next piece, and more pieces as long as each should end before the time `until`, judged by the time of
    the piece before it. Return the generator's result; None if pieces are left.
    """
    while True:
        begin = time.perf_counter()
        try:
            mx.eval(next(pieces))
        except StopIteration as end:
            mx.eval(end.value)
            return end.value
        if until is not None and 2 * time.perf_counter() - begin >= until:
            return None


def count_weights(module: nn.Module) -> int:
    """Return the number of weights in a module's matrices, counting packed ones as unpacked."""
    parts = (each for each in module.modules() if "weight" in each)
    return sum(each.weight.size * 32 // getattr(each, "bits", 32) for each in parts)


def is_fused(dim: int) -> bool:
    """Return whether MLX has a fused attention kernel, which stores no scores, for padded heads of `dim` numbers."""
    return dim <= FUSED_DIMS[-1] and mx.default_device() != mx.cpu


def attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float | None = None) -> mx.array:
    """Return the attention `[patches, heads * dim]` of patches `[patches, heads, dim]` to others. `scale` is the factor
    of products; None: `dim ** -0.5`.
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
    """Return heads `[patches, heads, dim]` rotated in float32. The two numbers of a rotated pair are `dim / 2` apart.
    The first half of the pairs rotates by rows, and the second by columns.
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
    """Read the tensors in `folder` whose names begin with `prefix` into the tower that `make_tower` builds. Evaluate
    them on this thread. Return the tower; None without such tensors or without a `vision_config` in config.json.
    `kernel` is the name of its convolution's weights; None if it has no convolution.

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
        EVALUATE.get()([mx.random.state, tower.parameters()])  # the state: see `load._evaluate`
    return tower
