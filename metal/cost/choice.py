"""The cost of the vector and the matrix kernel for each shape, and which of them `rules.py` chooses."""

from __future__ import annotations

from collections.abc import Iterator

from cortexmlx.metal.chips import CHIPS
from cortexmlx.metal.cost.cycles import cycles
from cortexmlx.metal.cost.kernels import candidates, paged
from cortexmlx.metal.rules import Variant
from cortexmlx.metal.shape import Kernel

DIMS = (64, 80, 96, 112, 128, 192, 256)
GROUPS = (1, 2, 4, 8, 16)
"""Query heads per KV head. 3 heads cost what 4 do, and 5 to 7 what 8 do: both kernels compute incomplete tiles like
full ones.
"""


def shapes(*dtypes: str) -> Iterator[Variant]:
    """Return the shapes of the table."""
    return (Variant(t, t, dim, dim, 32, group) for t in dtypes for dim in DIMS for group in GROUPS)


def spent(variant: Variant) -> dict[Kernel, float]:
    """Return cycles per token and KV head by the sheet, for every kernel that serves the shape."""
    return {candidate.kernel: cycles(paged(candidate).work) for candidate in candidates(variant)}


def table() -> Iterator[str]:
    """Yield the lines of the table: cycles per token and KV head of the vector and the matrix kernel. A * marks the
    chosen one. The last column is the cycles that memory leaves on the chip with the smallest budget.
    """
    yield f"{'':<14}" + "".join(f"{group:>8} per KV head" for group in GROUPS) + "    memory"
    yield f"{'':<14}" + f"{'vector  matrix':>20}" * len(GROUPS) + "    leaves"
    for variants in zip(*[shapes("float16", "bfloat16", "float32")] * len(GROUPS), strict=True):
        cells = "".join(f"{_cell(variant, Kernel.VECTOR)}{_cell(variant, Kernel.MATRIX)}" for variant in variants)
        least = min(chip.budget(paged(variants[0]).live_bytes) for chip in CHIPS.values())
        yield f"{variants[0].dtype:<10}{variants[0].key_dim:>4}{cells}{least:>10.0f}"


def _cell(variant: Variant, kernel: Kernel) -> str:
    found = spent(variant).get(kernel)
    return f"{'-':>9} " if found is None else f"{found:>9.0f}{'*' if variant.kernel is kernel else ' '}"
