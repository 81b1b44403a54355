"""The one list of kernel variants that are checked: on a GPU by `cortexmlx doctor` and `pytest -m metal`, by Apple's
compiler in continuous integration, and by the compilers and judges of the laboratory. Every shader is on it.
"""

from __future__ import annotations

from cortexmlx.metal.matmul.shape import MATMULS, MatmulVariant
from cortexmlx.metal.prefill import PREFILL_VARIANTS, PrefillVariant
from cortexmlx.metal.rules import VARIANTS, Variant
from cortexmlx.metal.tail_write import WRITES, TailWriteVariant

CheckedKernel = Variant | PrefillVariant | TailWriteVariant | MatmulVariant

CHECKED: tuple[CheckedKernel, ...] = (*VARIANTS, *PREFILL_VARIANTS, *WRITES, *MATMULS)


def select_quick() -> tuple[CheckedKernel, ...]:
    """Return the first variant of every kernel and dtype: what `cortexmlx doctor --quick` checks. A decode kernel for
    quantized keys and values counts as a kernel of its own.
    """
    first: dict[tuple[object, ...], CheckedKernel] = {}
    for variant in CHECKED:
        kernel = (variant.kernel, variant.kv_bits is not None) if isinstance(variant, Variant) else ()
        first.setdefault((type(variant), kernel, variant.dtype), variant)
    return tuple(first.values())
