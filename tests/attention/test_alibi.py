"""The slopes of ALiBi: those that the paper prints, and those that MLX gives its own layers."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from cortexmlx.attention.selfcheck_problems import alibi_slopes


def test_eight_heads_have_the_slopes_that_the_paper_prints() -> None:
    assert alibi_slopes(8).tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 12, 16, 32, 40, 71, 112])
def test_any_number_of_heads_has_the_slopes_of_mlxs_layer(heads: int) -> None:
    """MLX follows the authors' code. (40 are Baichuan's, 71 Falcon's, 112 BLOOM's.)"""
    theirs = nn.ALiBi.create_alibi_slope(heads)
    assert theirs.shape == (heads, 1, 1) and theirs.dtype == mx.float32
    np.testing.assert_allclose(alibi_slopes(heads), np.array(theirs).reshape(-1), rtol=1e-6)
