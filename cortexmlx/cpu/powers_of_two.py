"""Exponentials as powers of two: `2 ** (s * log2(e))` is `e ** s`.

On MLX's Linux CPU build `power` takes a third of the time of `exp`; elsewhere the two cost the same.
"""

from __future__ import annotations

import math

import mlx.core as mx

LOG2_E = math.log2(math.e)


def exp2(exponents: mx.array) -> mx.array:
    """Return `2 ** exponents`, elementwise, in the dtype of the exponents."""
    return mx.power(2.0, exponents)
