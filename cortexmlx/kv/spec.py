"""KVSpec: the shape, dtype and attention window of a layer's keys and values. No mlx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cortexmlx.kv.attention_window import AttentionWindow

BLOCK_SIZES = (8, 16, 32, 64, 128)
"""Tokens that a block may have."""

DEFAULT_BLOCK_SIZE = 32

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one number, by dtype."""

TAIL_COLUMNS = 16
"""W: decode steps between two flushes, at most, and columns of the tail, where a row's newest tokens wait for one."""


@dataclass(frozen=True)
class KVSpec:
    """What one layer keeps of a sequence.

    `kv_heads` heads keep a key of `key_dim` and a value of `value_dim` numbers of `dtype` ("float32", "float16",
    "bfloat16") for every token; with `value_in_key` the value is the key's first numbers and takes no memory of its own
    (latent attention). `window` None attends to all earlier tokens; w attends to the w newest, the token itself
    included, or if it is `chunked`, to those since the last multiple of w (`attention_window`). `row_bytes` is state
    that does not grow with the tokens: a recurrent layer has that and no heads. Layers with equal specs form one group
    and share block tables.

    Quantized keys and values are codes of `kv_bits` bits, and for every `kv_group_size` numbers of a head a scale and a
    bias of `dtype`.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    window: int | None = None
    row_bytes: int = 0
    chunked: bool = False
    value_in_key: bool = False
    kv_bits: int | None = None
    kv_group_size: int | None = None

    @property
    def attention_window(self) -> AttentionWindow:
        """How far back a query sees."""
        return AttentionWindow(self.window, self.chunked)

    @property
    def dims(self) -> tuple[int, ...]:
        """How many numbers a layer keeps for a token and head: of its key, and of its value."""
        return (self.key_dim,) if self.value_in_key else (self.key_dim, self.value_dim)

    @property
    def slab_arrays(self) -> tuple[tuple[int, str], ...]:
        """How many numbers, and of which dtype, each array of a layer's slab has for a token and head: the `dims`, or
        where they are quantized the codes in words of 32 bits, scales and biases of each.
        """
        if self.kv_bits is None or self.kv_group_size is None:
            return tuple((dim, self.dtype) for dim in self.dims)
        bits, group = self.kv_bits, self.kv_group_size
        each = (((dim * bits // 32, "uint32"), *((dim // group, self.dtype),) * 2) for dim in self.dims)
        return tuple(array for arrays in each for array in arrays)

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return ITEMSIZE[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes one layer keeps for one token."""
        return self.bytes_of(self.itemsize)

    def bytes_of(self, itemsize: int) -> int:
        """The same with numbers, or scales and biases, of `itemsize` bytes."""
        widths = ((width, 4 if dtype == "uint32" else itemsize) for width, dtype in self.slab_arrays)
        return self.kv_heads * sum(width * size for width, size in widths)


Counts = tuple[int, ...]
"""A number for each layer group: of blocks."""


@dataclass(frozen=True)
class LayerGroup:
    """The layers that share one spec, and so one set of block tables. `layers` index leaves of the model's caches."""

    spec: KVSpec
    layers: Sequence[int]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that all layers of the group keep for one token."""
        return self.spec.bytes_per_token * len(self.layers)


def paged(groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
    """The groups that keep something for every token. Where there are none, one without layers: its blocks take no
    memory, but lengths, rows and the prefix cache go by blocks.
    """
    return tuple(group for group in groups if group.spec.kv_heads) or (LayerGroup(KVSpec(0, 0, 0, "float32"), ()),)


def group_layers(specs: list[KVSpec]) -> tuple[LayerGroup, ...]:
    """Group layer indices by equal spec, in the order in which the specs first appear."""
    members: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        members.setdefault(spec, []).append(layer)
    return tuple(LayerGroup(spec, tuple(layers)) for spec, layers in members.items())


def of_each(groups: Sequence[LayerGroup], blocks: int | Sequence[int]) -> Counts:
    """`blocks` as a number for each group: one number stands for all."""
    return (blocks,) * len(groups) if isinstance(blocks, int) else tuple(blocks)
