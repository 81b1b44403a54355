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
"""The quantizations of keys and values that the kernels read: (bits, numbers in a group)."""

PARTITION = 256
"""Tokens of a partition: a range of absolute positions that one threadgroup attends to (`KernelGeometry.partition`).

It is short enough that one row of a few thousand tokens fills a GPU. It is long enough that partial results are a few
percent of the bytes read. It is the same for all batches, so that a row's sums are always cut at the same positions.
"""

SIMDGROUP = 32
"""Threads of a simdgroup."""


def item_bytes(dtype: str) -> int:
    """Return the bytes of one number of a dtype: 4 for an unsupported dtype, which a rule refuses."""
    return ITEMSIZE.get(dtype, 4)


class Kernel(Enum):
    """The decode kernels, by how they multiply a partition's queries with its keys and values."""

    VECTOR = "vector"
    """paged_decode.metal: the lanes of a simdgroup share out the numbers of a head. Each number that is loaded
    multiplies a number of each query head.
    """
    MATRIX = "matrix"
    """paged_matrix.metal: products of 8 x 8 matrices, whose columns are the query heads."""
    WIDE = "wide"
    """paged_wide.metal: as MATRIX, for heads that several simdgroups share out, and for values that lie in their
    keys.
    """


@dataclass(frozen=True)
class AttentionShape:
    """The shape of a layer's decode attention: dtypes, head dims, block size, query heads per KV head, and options
    such as sinks and ALiBi. It has no sliding window, which only decides where a row's first work item begins.
    """

    dtype: str
    """The dtype of the queries and the result."""
    kv_dtype: str
    """The dtype of keys and values. If they are quantized: of their scales and biases."""
    key_dim: int
    value_dim: int
    block_size: int
    """Tokens of a KV block."""
    group: int
    """Query heads that share a KV head."""
    softcap: bool = False
    sinks: bool = False
    alibi: bool = False
    """Whether ALiBi slopes are added to the scores."""
    query_tokens: int = 1
    """How many of a row's newest tokens attend. Each sees the tokens before it and itself."""
    latent: bool = False
    """Latent attention: a value is the first `value_dim` numbers of its key, and no values are stored."""
    kv_bits: int | None = None
    """Bits of quantized keys and values; None if they are plain."""
    quant_group: int | None = None
    """Numbers along the head_dim that share a scale and a bias; None if keys and values are plain."""

    @property
    def token_numbers(self) -> int:
        """How many numbers a KV head stores for a token, keys and values together."""
        return self.key_dim + (0 if self.latent else self.value_dim)

    @property
    def partial_floats(self) -> int:
        """Floats of a decode kernel's partial result for one query: `Partial<value_dim>` of paged_attention.h."""
        return self.value_dim + 2

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a KV head stores for a token, scales and biases included."""
        numbers, item = self.token_numbers, ITEMSIZE[self.kv_dtype]
        if self.kv_bits is None or self.quant_group is None:
            return numbers * item
        return numbers * self.kv_bits // 8 + numbers // self.quant_group * 2 * item

    @property
    def label(self) -> str:
        """A short description of the shape for tables and logs."""
        dtype = self.dtype if self.dtype == self.kv_dtype else f"{self.dtype} on {self.kv_dtype}"
        dims = str(self.key_dim) if self.key_dim == self.value_dim else f"{self.key_dim}/{self.value_dim}"
        extras = "".join(f", {name}" for name in ("latent", "softcap", "sinks", "alibi") if getattr(self, name))
        if self.kv_bits is not None:
            dtype += f", {self.kv_bits}-bit KV in groups of {self.quant_group}"
        tokens = f", {self.query_tokens} tokens" if self.query_tokens > 1 else ""
        return f"{dtype}, head_dim {dims}, {self.group} per KV head{tokens}, blocks of {self.block_size}{extras}"


@dataclass(frozen=True)
class ShapeRule:
    """A condition that an attention shape must meet, and the `reason` to give if it does not."""

    holds: Callable[[AttentionShape], bool]
    reason: str


@dataclass(frozen=True)
class KernelGeometry(ABC):
    """A decode kernel, and the threadgroup layout that it has for a shape.

    The queries of a KV head are cut into `tiles` tiles, and its values into `parts` parts. Each tile and part has a
    threadgroup of its own, whose `slices` simdgroups share the tokens. In one threadgroup together they would be 256
    threads or more, of which a core that has registers for 384 or 448 holds one at a time. It holds three threadgroups
    of 128. The price: each threadgroup loads the keys, all but the first of them from a cache if the keys are still
    there.
    """

    kernel: ClassVar[Kernel]
    name: ClassVar[str]
    """The name of the kernel's function."""
    file: ClassVar[str]
    """The kernel's file in `shaders/`."""
    entry: ClassVar[str]
    """The lines between MLX's generated signature and the kernel's function."""
    quantized_entry: ClassVar[str | None] = None
    """The entry for quantized keys and values; None if the kernel reads none."""
    rules: ClassVar[tuple[ShapeRule, ...]]
    """The kernel serves the shapes that meet all rules."""
    slice_tokens: ClassVar[int] = 32
    """Tokens that a simdgroup takes at a time. The softmax is done once for each slice."""

    shape: AttentionShape

    @property
    @abstractmethod
    def tile(self) -> int:
        """Queries that one simdgroup holds."""

    @property
    @abstractmethod
    def slices(self) -> int:
        """Simdgroups of a threadgroup that share the tokens of a partition."""

    @property
    def parts(self) -> int:
        """Into how many parts each value vector is split, each computed by different simdgroups."""
        return 1

    @property
    @abstractmethod
    def cycles(self) -> float:
        """Estimated cycles in which a core's scheduler issues the instructions for one token of a KV head. `rules.py`
        chooses the kernel with the fewest. For plain keys it is within a tenth of the compiled kernel's figure
        (metal/lab/README.md, "Which kernel").
        """

    @property
    @abstractmethod
    def threadgroup_bytes(self) -> int:
        """Threadgroup memory, in bytes."""

    @property
    @abstractmethod
    def template(self) -> list[tuple[str, int | bool]]:
        """This kernel's own template arguments, after those of all kernels: dtypes, dims, block size, group."""

    @cached_property
    def partition(self) -> int:
        """Tokens of a partition, the same for all batches and query tokens. It doubles if the partial results of many
        heads, written and read again, would exceed a tenth of the bytes read.
        """
        partials = 2 * 4 * self.shape.group * self.shape.partial_floats
        read = PARTITION * self.shape.token_numbers * item_bytes(self.shape.kv_dtype)
        return PARTITION if 10 * partials <= read else 2 * PARTITION

    @property
    def threadgroups(self) -> int:
        """Threadgroups for one work item and KV head: one for each tile and part."""
        return self.tiles * self.parts

    @property
    def tiles(self) -> int:
        """Tiles into which the queries of a KV head are cut."""
        return -(-self.shape.group * self.shape.query_tokens // self.tile)

    @cached_property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return SIMDGROUP * self.slices

    @classmethod
    def refusal(cls, shape: AttentionShape) -> str | None:
        """Return the reason why the kernel does not serve a shape, or None if it does."""
        return next((rule.reason for rule in cls.rules if not rule.holds(shape)), None)
