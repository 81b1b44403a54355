"""The shape of a matmul with quantized weights, the rules which shapes the kernel serves, and its threadgroup."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from cortexmlx.metal.shape import DTYPES, SIMDGROUP
from cortexmlx.metal.work import SMALL

FORMATS = (("affine", 4, 32), ("affine", 4, 64), ("affine", 8, 32), ("affine", 8, 64), ("mxfp4", 4, 32))
"""The formats of `mx.quantize` that the kernel reads: (mode, bits, numbers in a group)."""

TILE = 8
"""Rows of a tile: the columns of a matrix."""

MAX_TILES = 3
"""The most tiles of rows that a simdgroup holds: more would not fit its registers."""

MAX_ROWS = 32
"""The most rows of a matmul."""

EXPERT_ROWS = 16
"""Rows of an expert that are computed together. With more, its weights are read once more for each 16."""

MAX_WORDS = 1 << 32
"""The most 32-bit words of codes: 16 GiB. The kernel counts them by 32 bits."""

MAX_PAIRS = 512
"""The most pairs of a token and an expert. Each threadgroup looks for those of its expert among all."""

OUTPUTS = 32
"""Outputs that a threadgroup computes."""

SLICES = 8
"""The most simdgroups that share the inputs of a threadgroup's outputs."""


@dataclass(frozen=True)
class MatmulShape:
    """The shape of a matmul with quantized weights `[outputs, inputs]`, or several experts', and the rows' dtype."""

    dtype: str
    """The dtype of the rows and the result. It is that of affine scales and biases, too."""
    mode: str
    """The mode of `mx.quantize`: "affine" or "mxfp4"."""
    bits: int
    group: int
    """Neighbouring inputs that share a scale."""
    inputs: int
    outputs: int
    experts: int | None = None
    """The number of matrices, of which each row is multiplied with one; None for a single matrix."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, computed once because each layer of each step looks up a shape."""
        return hash((self.dtype, self.mode, self.bits, self.group, self.inputs, self.outputs, self.experts))

    @property
    def slices(self) -> int:
        """Simdgroups that share the inputs: a power of two, and no more than there are groups. It depends on the shape
        alone, so that a row's sums are always cut at the same places.
        """
        return min(SLICES, 1 << (self.inputs // self.group).bit_length() - 1)

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return SIMDGROUP * self.slices

    @property
    def threadgroups(self) -> int:
        """Threadgroups that share the outputs of one matrix."""
        return -(-self.outputs // OUTPUTS)

    @property
    def weight_bytes(self) -> int:
        """Bytes of one quantized matrix: codes, scales and biases."""
        numbers = self.inputs * self.outputs
        scale = 1 if self.mode == "mxfp4" else 2 * (4 if self.dtype == "float32" else 2)
        return numbers * self.bits // 8 + numbers // self.group * scale

    @property
    def label(self) -> str:
        """A short description of the shape for tables and logs."""
        form = self.mode if self.mode != "affine" else f"{self.bits} bits in groups of {self.group}"
        experts = "" if self.experts is None else f", {self.experts} experts"
        return f"{self.dtype}, {form}, {self.inputs} to {self.outputs}{experts}"


@dataclass(frozen=True)
class MatmulRule:
    """A condition that a matmul's shape and number of rows must meet, and the `reason` to give if they do not."""

    holds: Callable[[MatmulShape, int], bool]
    reason: str


RULES = (
    MatmulRule(lambda s, _: s.dtype in DTYPES, "the kernel multiplies float32, float16 and bfloat16"),
    MatmulRule(
        lambda s, _: (s.mode, s.bits, s.group) in FORMATS,
        "the kernel reads 4 and 8 bits in groups of 32 or 64, and mxfp4",
    ),
    MatmulRule(lambda s, _: s.inputs > 0 and s.inputs % s.group == 0, "inputs must be cut into whole groups"),
    MatmulRule(lambda s, _: s.outputs > 0, "there must be an output"),
    MatmulRule(lambda s, _: s.experts is None or s.experts > 0, "there must be an expert"),
    MatmulRule(
        lambda s, _: (s.experts or 1) * s.outputs * s.inputs // s.group >= SMALL,
        f"an input of fewer than {SMALL} numbers, as its scales are, would be in another address space",
    ),
    MatmulRule(
        lambda s, _: (s.experts or 1) * s.outputs * s.inputs * s.bits // 32 <= MAX_WORDS,
        "codes of more than 16 GiB have more 32-bit words than the kernel counts",
    ),
    MatmulRule(lambda s, rows: s.experts is not None or 0 < rows <= MAX_ROWS, f"a matmul has 1 to {MAX_ROWS} rows"),
    MatmulRule(
        lambda s, rows: s.experts is None or 0 < rows <= MAX_PAIRS,
        f"a matmul of experts has 1 to {MAX_PAIRS} pairs of a token and an expert",
    ),
)


def refusal(shape: MatmulShape, rows: int) -> str | None:
    """Return why the kernel refuses a matmul of `rows` rows (token-expert pairs with experts); None if it does not."""
    return next((rule.reason for rule in RULES if not rule.holds(shape, rows)), None)


@dataclass(frozen=True)
class RowSplit:
    """How the rows of a matmul are split: into `parts` of `tiles` tiles each. Each part reads the weights once."""

    parts: int
    tiles: int


def split_rows(rows: int) -> RowSplit:
    """Return how a number of rows is split: into one part up to 24 rows, or into more of equal size."""
    tiles = -(-rows // TILE)
    parts = -(-tiles // MAX_TILES)
    return RowSplit(parts, -(-tiles // parts))


@dataclass(frozen=True)
class MatmulVariant:
    """A matmul that the kernel is checked on: the shape, and a number of rows (with experts: token-expert pairs)."""

    shape: MatmulShape
    rows: int

    @property
    def dtype(self) -> str:
        """The dtype of rows and results."""
        return self.shape.dtype

    @property
    def label(self) -> str:
        """A short description of the matmul for tables and logs."""
        return f"{self.shape.label}, {self.rows} {'rows' if self.shape.experts is None else 'pairs'}"


MATMULS: tuple[MatmulVariant, ...] = (
    *(
        MatmulVariant(MatmulShape(dtype, mode, bits, group, 4096, 4096), rows)
        for dtype in DTYPES
        for mode, bits, group in FORMATS
        for rows in (8, 16)
    ),
    *(MatmulVariant(MatmulShape(dtype, "affine", bits, 64, 4096, 4096), 24) for dtype in DTYPES for bits in (4, 8)),
    *(
        MatmulVariant(MatmulShape("bfloat16", mode, bits, group, 2048, 768, experts=8), 16)
        for mode, bits, group in (("affine", 4, 64), ("affine", 8, 64), ("mxfp4", 4, 32))
    ),
)
"""The matmuls in `CHECKED`, the list of checked.py. They cover every format and dtype, and the tiles of rows."""
