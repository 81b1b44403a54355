"""The shape that a decode kernel is compiled for, and the threadgroup layout that all partition kernels share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import ClassVar

from cortexmlx.kv.spec import ITEMSIZE

DTYPES = ("float32", "float16", "bfloat16")

QUANTIZATIONS = ((None, None), (8, 32), (8, 64), (4, 32), (4, 64))
"""How keys and values may be quantized: (bits, numbers of a group)."""

PARTITION = 256
"""Tokens of a partition: an absolute range of positions that one threadgroup attends to (`Geometry.partition`).

Short enough that a lone row of a few thousand tokens fills a GPU, long enough that the partial results are a few
percent of what is read. The same for all batches, so that a row's sums are always cut in the same places.
"""

SIMDGROUP = 32
"""Threads of a simdgroup."""


def item_bytes(dtype: str) -> int:
    """Bytes of a number; 4 of a dtype that the kernels do not know, which a rule of its own refuses."""
    return ITEMSIZE.get(dtype, 4)


class Kernel(Enum):
    """The kernels of a partition: how queries meet keys and values."""

    VECTOR = "vector"
    """paged_decode.metal: the lanes of a simdgroup lie across the head, each number multiplies each query head."""
    MATRIX = "matrix"
    """paged_matrix.metal: products of 8 x 8 matrices, whose columns are the query heads."""
    WIDE = "wide"
    """paged_wide.metal: the same for heads that several simdgroups share out, and for values that lie in their keys."""


@dataclass(frozen=True)
class Shape:
    """What a layer's decode attention looks like. `group` query heads share a KV head; `dtype` is that of the queries
    and the result, `kv_dtype` that of keys and values; `softcap`, `sinks` and `alibi` (slopes) say whether they are
    used. The queries are a row's newest `query_tokens` tokens, of which each sees what was before it and itself. With
    `latent` a value is the first `value_dim` numbers of its key (latent attention), and there are no values beside the
    keys. Keys and values may be quantized to `kv_bits` bits in groups of `quant_group` along their dims, with scales
    and biases in `kv_dtype`.

    The sliding window is no part of it: a window is where a row's first work item begins.
    """

    dtype: str
    kv_dtype: str
    key_dim: int
    value_dim: int
    block_size: int
    group: int
    softcap: bool = False
    sinks: bool = False
    alibi: bool = False
    query_tokens: int = 1
    latent: bool = False
    kv_bits: int | None = None
    quant_group: int | None = None

    @property
    def token_numbers(self) -> int:
        """Numbers of a token that a KV head keeps."""
        return self.key_dim + (0 if self.latent else self.value_dim)

    @property
    def partial_floats(self) -> int:
        """Floats of what a partition's kernel writes for a query: `Partial<value_dim>` of paged_attention.h."""
        return self.value_dim + 2

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in a KV head, scales and biases included."""
        numbers, item = self.token_numbers, ITEMSIZE[self.kv_dtype]
        if self.kv_bits is None or self.quant_group is None:
            return numbers * item
        return numbers * self.kv_bits // 8 + numbers // self.quant_group * 2 * item

    @property
    def label(self) -> str:
        """The shape in a line of a table or a log."""
        dtype = self.dtype if self.dtype == self.kv_dtype else f"{self.dtype} on {self.kv_dtype}"
        dims = str(self.key_dim) if self.key_dim == self.value_dim else f"{self.key_dim}/{self.value_dim}"
        extras = "".join(f", {name}" for name in ("latent", "softcap", "sinks", "alibi") if getattr(self, name))
        if self.kv_bits is not None:
            dtype += f", {self.kv_bits}-bit KV in groups of {self.quant_group}"
        tokens = f", {self.query_tokens} tokens" if self.query_tokens > 1 else ""
        return f"{dtype}, head_dim {dims}, {self.group} per KV head{tokens}, blocks of {self.block_size}{extras}"


@dataclass(frozen=True)
class Rule:
    """A condition that a shape must meet; `reason` is what to say when it does not."""

    holds: Callable[[Shape], bool]
    reason: str


@dataclass(frozen=True)
class Geometry(ABC):
    """A kernel of a partition, and how a shape is spread over its threadgroup, which has `threads` threads: `slices`
    simdgroups share the tokens, for each of `tiles` tiles of `tile` queries and each of `parts` parts of a value.

    `name`, `file` and `entry` are the kernel's: its entry is the few lines between MLX's generated signature and the
    file's function, and there is another for quantized keys and values. It serves the shapes for which all of its
    `rules` hold.
    """

    kernel: ClassVar[Kernel]
    name: ClassVar[str]
    file: ClassVar[str]
    entry: ClassVar[str]
    quantized_entry: ClassVar[str | None] = None
    rules: ClassVar[tuple[Rule, ...]]
    slice_tokens: ClassVar[int] = 32
    """Tokens that a simdgroup meets at a time: the softmax, among others, is done once for so many."""

    shape: Shape

    @property
    @abstractmethod
    def tile(self) -> int:
        """Queries that one simdgroup holds."""

    @property
    @abstractmethod
    def slices(self) -> int:
        """Simdgroups that share the tokens of a partition."""

    @property
    def parts(self) -> int:
        """Parts of a value, which several simdgroups share out."""
        return 1

    @property
    @abstractmethod
    def cycles(self) -> float:
        """About how many cycles of a core's scheduler a token of a KV head costs: the cost sheet's figure, within a
        tenth, from what the geometry says (tests/metal/cost/test_choice.py). By it rules.py chooses.
        """

    @property
    @abstractmethod
    def threadgroup_bytes(self) -> int:
        """Threadgroup memory."""

    @property
    @abstractmethod
    def template(self) -> list[tuple[str, int | bool]]:
        """The kernel's own template arguments, behind those of every kernel (dtypes, dimensions, block size, group)."""

    @cached_property
    def partition(self) -> int:
        """Tokens of a partition, the same for all batches and query tokens: twice the usual ones where so many heads
        share them that their partial results, written and read again, would be more than a tenth of what is read.
        """
        partials = 2 * 4 * self.shape.group * self.shape.partial_floats
        read = PARTITION * self.shape.token_numbers * item_bytes(self.shape.kv_dtype)
        return PARTITION if 10 * partials <= read else 2 * PARTITION

    @property
    def threadgroups(self) -> int:
        """Threadgroups for one work item and KV head."""
        return 1

    @property
    def tiles(self) -> int:
        """Tiles of queries. In one threadgroup they share the loaded keys and values."""
        return -(-self.shape.group * self.shape.query_tokens // self.tile)

    @cached_property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return SIMDGROUP * self.slices * self.tiles * self.parts

    @classmethod
    def why_not(cls, shape: Shape) -> str | None:
        """Why the kernel does not serve a shape, or None if it does."""
        return next((rule.reason for rule in cls.rules if not rule.holds(shape)), None)
