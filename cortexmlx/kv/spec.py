"""What each layer caches (KVSpec: shape, dtype, attention window), and the groups of layers that cache alike. Without
mlx.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cortexmlx.errors import ModelUnsupported

BLOCK_SIZES = (8, 16, 32, 64, 128)
"""The numbers of tokens that a block may have."""

DEFAULT_BLOCK_SIZE = 32

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one number, by dtype."""

TAIL_COLUMNS = 16
"""W: columns of the tail, which holds each row's newest tokens until a flush. So there are at most W decode steps
between two flushes.
"""

LONG_TAIL_COLUMNS = 64
"""The columns of a tail with few rows on a GPU, if copying them costs less than the flushes they save
(`max_long_tail_rows` of sizing.py).
"""

LONG_TAIL_ROWS = 2
"""The most rows of such a tail."""


@dataclass(frozen=True)
class KVSpec:
    """What one layer caches for a sequence: shape, dtype, window and quantization of its keys and values, or the bytes
    of its recurrent state. Layers with equal specs form one group and share block tables.

    Quantized keys and values are codes of `kv_bits` bits, with a scale and a bias of `dtype` for every `kv_group_size`
    numbers of a head.
    """

    kv_heads: int
    """Heads that keep a key and a value for every token; 0 in a recurrent layer."""
    key_dim: int
    """Numbers of a key."""
    value_dim: int
    """Numbers of a value."""
    dtype: str
    """"float32", "float16" or "bfloat16"."""
    window: int | None = None
    """How many of the newest tokens a query sees, itself included; None: all tokens."""
    row_bytes: int = 0
    """Bytes of a state whose size does not depend on the number of tokens: that of a recurrent layer."""
    chunked: bool = False
    """Whether a query sees the tokens since the last multiple of `window` instead."""
    value_in_key: bool = False
    """Whether the value is the key's first numbers, and takes no memory of its own (latent attention)."""
    kv_bits: int | None = None
    kv_group_size: int | None = None

    @property
    def attention_window(self) -> AttentionWindow:
        """The layer's attention window."""
        return AttentionWindow(self.window, self.chunked)

    @property
    def dims(self) -> tuple[int, ...]:
        """How many numbers a key has, and a value if values are stored, per token and head."""
        return (self.key_dim,) if self.value_in_key else (self.key_dim, self.value_dim)

    @property
    def slab_arrays(self) -> tuple[tuple[int, str], ...]:
        """The width (numbers per token and head) and dtype of each array of the layer's slab.

        Plain keys and values are one array each, of the `dims`. Quantized ones are three: codes in words of 32 bits,
        scales, and biases.
        """
        if self.kv_bits is None or self.kv_group_size is None:
            return tuple((dim, self.dtype) for dim in self.dims)
        bits, group = self.kv_bits, self.kv_group_size
        each = (((dim * bits // 32, "uint32"), *((dim // group, self.dtype),) * 2) for dim in self.dims)
        return tuple(array for arrays in each for array in arrays)

    @property
    def itemsize(self) -> int:
        """The bytes of one number of `dtype`."""
        return ITEMSIZE[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """The bytes that the layer keeps for one token."""
        return self.bytes_per_token_with(self.itemsize)

    def bytes_per_token_with(self, itemsize: int) -> int:
        """Return the bytes that the layer keeps for a token if a number (or scale, or bias) has `itemsize` bytes."""
        widths = ((width, 4 if dtype == "uint32" else itemsize) for width, dtype in self.slab_arrays)
        return self.kv_heads * sum(width * size for width, size in widths)


GroupCounts = tuple[int, ...]
"""A number of blocks for each layer group."""


@dataclass(frozen=True)
class LayerGroup:
    """The layers that share one spec, and so one set of block tables. `layers` index leaves of the model's caches."""

    spec: KVSpec
    layers: tuple[int, ...]

    @property
    def bytes_per_token(self) -> int:
        """The bytes that all layers of the group keep for one token."""
        return self.spec.bytes_per_token * len(self.layers)


def paged_groups(groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
    """Return the groups that keep something for every token.

    If there are none, return one group without layers. Its blocks take no memory, but lengths, rows and the prefix
    cache need blocks.
    """
    return tuple(group for group in groups if group.spec.kv_heads) or (LayerGroup(KVSpec(0, 0, 0, "float32"), ()),)


def group_layers(specs: list[KVSpec]) -> tuple[LayerGroup, ...]:
    """Group layer indices by equal spec, in the order in which the specs first appear."""
    members: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        members.setdefault(spec, []).append(layer)
    return tuple(LayerGroup(spec, tuple(layers)) for spec, layers in members.items())


def blocks_per_group(groups: Sequence[LayerGroup], blocks: int | Sequence[int]) -> GroupCounts:
    """Return `blocks` as one number for each group. A single number holds for all groups."""
    return (blocks,) * len(groups) if isinstance(blocks, int) else tuple(blocks)


# AttentionWindow: how far back a query sees.


_Position = TypeVar("_Position", int, npt.NDArray[np.int32], npt.NDArray[np.int64])


@dataclass(frozen=True)
class AttentionWindow:
    """Which tokens of a row a query sees: all up to itself, a sliding window, or those of its chunk.

    `tokens` None: all of them. w: the newest w, itself included (a sliding window). With `chunked`, a row is cut at the
    multiples of `tokens`, and a query sees the tokens of its own chunk up to itself.
    """

    tokens: int | None = None
    chunked: bool = False

    def oldest_visible(self, position: _Position) -> _Position:
        """Return the position of the oldest token that a query at `position` (>= 0) sees. Elementwise for an array."""
        if self.tokens is None:
            return position * 0
        if self.chunked:
            return position - position % self.tokens
        oldest = position - (self.tokens - 1)
        return oldest * (oldest > 0)

    def first_visible_block(self, position: int, block_size: int) -> int:
        """Return the index in a row of the first block that a query at `position` sees."""
        return self.oldest_visible(position) // block_size


# Which keys and values can be quantized, and in groups of how many numbers.


KV_BITS = (8, 4)
"""Bits of a code."""

GROUP_SIZES = (64, 32)
"""How many numbers along a head share a scale and a bias. The first one takes the fewest bytes."""


def quantize_groups(
    groups: Sequence[LayerGroup], bits: int | None, group_size: int | None = None
) -> tuple[LayerGroup, ...]:
    """Return the groups with keys and values of `bits` bits (None: unchanged). Recurrent groups stay as they are.

    `group_size` None takes the first of `GROUP_SIZES` that divides every key and value. Raises ModelUnsupported if none
    does, if the given one does not, or if no layer keeps keys and values.
    """
    if bits is None:
        return tuple(groups)
    specs = [group.spec for group in groups if group.spec.kv_heads]
    if not specs:
        raise ModelUnsupported(f"kv_bits is {bits}, but no layer keeps keys and values: leave it out")
    size = group_size or next((size for size in GROUP_SIZES if not _indivisible_dims(specs, size)), GROUP_SIZES[-1])
    if indivisible_sizes := _indivisible_dims(specs, size):
        other_size = next((s for s in GROUP_SIZES if not _indivisible_dims(specs, s)), None)
        advice = "use the model without kv_bits" if other_size is None else f"choose kv_group_size {other_size}"
        raise ModelUnsupported(
            f"keys and values of {' and '.join(map(str, indivisible_sizes))} numbers cannot be quantized in groups of "
            f"{size}, which do not divide them: {advice}"
        )
    return tuple(
        replace(group, spec=replace(group.spec, kv_bits=bits, kv_group_size=size)) if group.spec.kv_heads else group
        for group in groups
    )


def kv_bits_error(bits: int, reason: str) -> ModelUnsupported:
    """Return the error to raise if `kv_bits` is set for a model that does not run on the paged arena."""
    return ModelUnsupported(f"kv_bits is {bits}, which paged attention alone has: leave it out. {reason}")


def describe_quantization(groups: Sequence[LayerGroup]) -> str:
    """Return in words how keys and values are quantized, such as "8 bits in groups of 64"; empty if they are not."""
    spec = next((group.spec for group in groups if group.spec.kv_bits is not None), None)
    return "" if spec is None else f"{spec.kv_bits} bits in groups of {spec.kv_group_size}"


def _indivisible_dims(specs: Sequence[KVSpec], size: int) -> list[int]:
    """Return the key and value dims that are no multiples of `size`, values that are a part of their keys included."""
    return sorted({dim for spec in specs for dim in (spec.key_dim, spec.value_dim) if dim % size})
