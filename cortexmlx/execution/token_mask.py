"""Which tokens a row may choose: bits on the host, applied to logits on the device."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from cortexmlx.execution.boundary import TokenMask


def masked(logits: mx.array, mask: TokenMask) -> mx.array:
    """`logits [R, V]` with -inf for the tokens that a row of the mask may not choose. Other rows stay bit by bit."""
    rows, vocab = logits.shape
    bits = mx.array(mask.allowed)[:, :, None] >> mx.arange(32, dtype=mx.uint32)
    allowed = (bits & 1).reshape(len(mask.rows), -1)[:, :vocab].astype(mx.bool_)
    if len(mask.rows) == rows and (mask.rows == np.arange(rows)).all():
        return mx.where(allowed, logits, -mx.inf)
    changed, where = logits[:], mx.array(mask.rows)
    changed[where] = mx.where(allowed, logits[where], -mx.inf)
    return changed
