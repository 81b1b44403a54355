"""The slopes of ALiBi, attention with linear biases: Press, Smith and Lewis, "Train Short, Test Long" (2022)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def alibi_slopes(heads: int) -> npt.NDArray[np.float32]:
    """Return what each query head subtracts from a logit per token of distance, `[heads]`: `2 ** (-8 * h / heads)` for
    h from 1, as section 3 of the paper says for powers of 2.

    Other numbers of heads get the slopes of the next smaller power of 2, and then the first, third, ... slopes of the
    next larger one, as in the authors' code and the BLOOM and MPT models.
    """
    whole = 1 << heads.bit_length() - 1
    between = -4 * np.arange(1, 2 * (heads - whole), 2) / whole
    exponents = np.concatenate([-8 * np.arange(1, whole + 1) / whole, between])
    return np.array(np.exp2(exponents), np.float32)
