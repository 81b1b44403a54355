"""Which shapes the decode kernels serve, and how a shape is spread over a threadgroup: every rule with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

DTYPES = ("float32", "float16", "bfloat16")

PARTITION = 256
"""Tokens of a partition: an absolute range of positions that one threadgroup attends to.

Short enough that a lone row of a few thousand tokens fills a GPU, long enough that the partial results are a few
percent of what is read. The same for all batches, so that a row's sums are always cut in the same places.
"""

THREADGROUP_BYTES = 32 * 1024
REGISTERS = 64
"""Floats of a tile of query heads and the tokens loaded ahead that a thread of the vector kernel may hold: with
addresses and sums they are at most 116 of its 128 registers, and a core holds 448 threads
(`python -m cortexmlx.metal.agx`)."""
THREADS = 448
"""Threads of a threadgroup at most: what a core can hold of them."""
COLUMNS = 8
"""Columns of a matrix: the query heads that a simdgroup of the matrix kernel has."""
MATRIX_ROW = 72
"""Floats that 64 numbers of an output take in threadgroup memory: gaps let the lanes write to different banks."""
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
REDUCE_SIMDGROUPS = 4
REDUCE_THREADS = 32 * REDUCE_SIMDGROUPS


def lane_numbers(dim: int) -> int:
    """How many numbers of a head a lane holds: `LaneLayout<dim>::COUNT` of paged_attention.h."""
    pack = 2 if dim % 64 == 0 and dim % 128 != 0 else 4
    return -(-(dim // pack) // 32) * pack


class Kernel(Enum):
    """The kernels of a partition: how queries meet keys and values."""

    VECTOR = "vector"
    """paged_decode.metal: the lanes of a simdgroup lie across the head, each number multiplies each query head."""
    MATRIX = "matrix"
    """paged_matrix.metal: products of 8 x 8 matrices, whose columns are the query heads."""


@dataclass(frozen=True)
class Variant:
    """One instantiation of the decode and reduce kernels. `group` query heads share a KV head; `dtype` is that of the
    queries and the result, `kv_dtype` that of keys and values; `softcap` and `sinks` say whether they are used. The
    queries are a row's newest `query_tokens` tokens, of which each sees what was before it and itself.

    The sliding window is no part of it: a window is where a row's first work item begins. `forced` is a kernel in place
    of the one that `kernel` would choose: for comparisons.
    """

    dtype: str
    kv_dtype: str
    key_dim: int
    value_dim: int
    block_size: int
    group: int
    softcap: bool = False
    sinks: bool = False
    query_tokens: int = 1
    forced: Kernel | None = None

    @cached_property
    def kernel(self) -> Kernel:
        """The kernel that a partition runs on: the matrix kernel wherever no rule of `MATRIX_RULES` is against it."""
        return self.forced or (Kernel.VECTOR if why_vector(self) else Kernel.MATRIX)

    @cached_property
    def tile(self) -> int:
        """Query heads that one simdgroup holds, a power of 2: up to 8, as many as fit its registers; of the matrix
        kernel the columns of a matrix.
        """
        if self.kernel is Kernel.MATRIX:
            return COLUMNS
        return next(tile for tile in (8, 4, 2, 1) if tile < 2 * self.group and self._registers(tile, 2) <= REGISTERS)

    @cached_property
    def ahead(self) -> int:
        """Tokens that the vector kernel loads before the first is used: up to 8, as many as fit the registers."""
        most = min(8, 32 // self.tile)
        return next(ahead for ahead in (8, 4, 2) if ahead <= most and self._registers(self.tile, ahead) <= REGISTERS)

    def _registers(self, tile: int, ahead: int) -> float:
        """Floats for the queries, outputs and scores of a tile, and for the tokens loaded: halves stay halves."""
        of_query, of_token = (0.5 if dtype == "float16" else 1.0 for dtype in (self.dtype, self.kv_dtype))
        key, value = lane_numbers(self.key_dim), lane_numbers(self.value_dim)
        return tile * (key * of_query + value + 1) + ahead * max(key, value) * of_token

    @property
    def tiles(self) -> int:
        """Tiles of query heads, which share the loaded keys and values within a threadgroup."""
        return -(-self.group * self.query_tokens // self.tile)

    @property
    def slices(self) -> int:
        """Simdgroups that share the tokens of a partition: 8 where a tile leaves registers for them, fewer where many
        tiles make the threadgroup large.
        """
        if self.kernel is Kernel.MATRIX:
            return 4 if self.tiles * self.parts <= 2 else 2
        if self.tiles == 1:
            return 8 if self.tile <= 2 else 4
        return 4 if self.tiles == 2 else 2 if self.tiles <= 4 else 1

    @property
    def parts(self) -> int:
        """Parts of a value, which the matrix kernel gives to several simdgroups, so that the output and what is being
        loaded fit the registers.
        """
        most = 128 if ITEM_BYTES.get(self.kv_dtype) == 2 else 96
        return 2 if self.kernel is Kernel.MATRIX and self.value_dim > most and self.value_dim % 16 == 0 else 1

    @cached_property
    def threads(self) -> int:
        """Threads of a decode threadgroup."""
        return 32 * self.slices * self.tiles * self.parts

    @property
    def threadgroup_bytes(self) -> int:
        """Threadgroup memory of the decode kernel."""
        if self.kernel is Kernel.MATRIX:
            queries = self.tiles * COLUMNS * -(-self.key_dim // 32) * 32 * ITEM_BYTES.get(self.dtype, 4)
            return queries + 4 * self.threads // 32 * COLUMNS * (MATRIX_ROW + 2)
        return 4 * self.slices * self.tiles * (self.value_dim + 2 * self.tile)

    @property
    def partial_floats(self) -> int:
        """Floats of what the decode kernel writes for a query head: `Partial<value_dim>` of paged_attention.h."""
        return self.value_dim + 2

    @property
    def label(self) -> str:
        """The variant in a line of a table or a log."""
        dtype = self.dtype if self.dtype == self.kv_dtype else f"{self.dtype} on {self.kv_dtype}"
        dims = str(self.key_dim) if self.key_dim == self.value_dim else f"{self.key_dim}/{self.value_dim}"
        extras = "".join(f", {name}" for name in ("softcap", "sinks") if getattr(self, name))
        extras += ", matrix kernel" if self.kernel is Kernel.MATRIX else ""
        tokens = f", {self.query_tokens} tokens" if self.query_tokens > 1 else ""
        return f"{dtype}, head_dim {dims}, {self.group} per KV head{tokens}, blocks of {self.block_size}{extras}"


@dataclass(frozen=True)
class Rule:
    """A condition that a variant must meet to run on the kernels; `reason` is what to say when it does not."""

    holds: Callable[[Variant], bool]
    reason: str


RULES: tuple[Rule, ...] = (
    Rule(lambda v: v.dtype in DTYPES and v.kv_dtype in DTYPES, "the kernels read float32, float16 and bfloat16"),
    Rule(
        lambda v: v.key_dim % 4 == 0 and v.value_dim % 4 == 0,
        "the lanes load 2 or 4 numbers at a time, so a head_dim must be a multiple of 4",
    ),
    Rule(
        lambda v: min(v.key_dim, v.value_dim) >= 8 and max(v.key_dim, v.value_dim) <= 256,
        "a head_dim must lie between 8 and 256: of a longer head a lane would hold more numbers than it has registers",
    ),
    Rule(
        lambda v: v.query_tokens == 1 or v.kernel is Kernel.MATRIX,
        "several query tokens of a row are columns of the matrix kernel, which does not serve this shape",
    ),
    Rule(
        lambda v: v.threads <= THREADS,
        f"the query heads of one KV head would need more than {THREADS} threads in a threadgroup",
    ),
    Rule(
        lambda v: v.threadgroup_bytes <= THREADGROUP_BYTES,
        f"a threadgroup would need more than {THREADGROUP_BYTES} bytes of threadgroup memory",
    ),
)


MATRIX_RULES: tuple[Rule, ...] = (
    Rule(
        lambda v: (v.group >= 3 or v.query_tokens > 1) and v.group * v.query_tokens <= 16,
        "1 and 2 query heads leave most of a matrix's 8 columns empty, and more than 16 queries need a third tile",
    ),
    Rule(
        lambda v: v.key_dim % 8 == 0 and v.value_dim % (8 if v.value_dim <= 128 else 16) == 0 and v.block_size % 8 == 0,
        "head_dim and blocks must be cut into matrices of 8 rows",
    ),
    Rule(
        lambda v: (
            min(v.key_dim, v.value_dim) >= 64
            and max(v.key_dim, v.value_dim) <= 256
            and max(v.key_dim * ITEM_BYTES.get(v.dtype, 4), v.value_dim * ITEM_BYTES.get(v.kv_dtype, 4)) <= 768
        ),
        "a head_dim below 64 does not fill a load, and one above 256, or 192 in float32, does not fit the registers",
    ),
)
"""When the matrix kernel serves, and why the vector kernel does otherwise."""


def why_vector(variant: Variant) -> str | None:
    """Why a variant is the vector kernel's, or None if it is the matrix kernel's."""
    return next((rule.reason for rule in MATRIX_RULES if not rule.holds(variant)), None)


def refusal(variant: Variant) -> str | None:
    """Why the kernels do not serve a variant, or None if they do."""
    return next((rule.reason for rule in RULES if not rule.holds(variant)), None)


VARIANTS: tuple[Variant, ...] = (
    *(Variant(t, t, d, d, 32, 4) for t in ("float16", "bfloat16", "float32") for d in (64, 80, 96, 112, 128, 192, 256)),
    *(Variant("float16", "float16", 128, 128, 32, g) for g in (1, 2, 3, 5, 7, 8, 16)),
    *(Variant("float16", "float16", 128, 128, b, 4) for b in (8, 16, 64, 128)),
    Variant("float16", "float16", 192, 128, 32, 4),
    Variant("bfloat16", "bfloat16", 64, 64, 32, 8, sinks=True),
    Variant("float16", "float16", 256, 256, 32, 2, softcap=True),
)
"""The variants that are checked as such: by `cortexmlx doctor` on the GPU, and by Apple's compiler in continuous
integration. Every head_dim and dtype, groups, block sizes and options once."""
