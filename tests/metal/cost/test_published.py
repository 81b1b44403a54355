"""The published measurements: what their tables say, worked out another way."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest

from cortexmlx.metal.chips import CHIPS
from cortexmlx.metal.cost.published import MEASURED, SHARED, TWO_PASS


@pytest.mark.parametrize(
    ("kernel", "dim", "microseconds"),
    [(SHARED, 128, "139.3"), (TWO_PASS, 128, "156.2"), (SHARED, 64, "186.6"), (TWO_PASS, 64, "244.0")],
)
def test_bandwidth_is_64_mebibytes_over_the_time(kernel: str, dim: int, microseconds: str) -> None:
    """4 heads of 128 and 8 of 64 are the same bytes: 512 numbers of two bytes, keys and values, for 32,768 tokens."""
    (found,) = (m for m in MEASURED if (m.chip, m.kernel, m.dim) == ("M5 Max", kernel, dim))
    assert found.bandwidth == pytest.approx(float(Fraction(64 * 2**20) / Fraction(microseconds) / 1000))
    assert found.group == 8


def test_all_are_of_known_chips_and_no_faster_than_their_memory() -> None:
    for m in MEASURED:
        assert m.bandwidth < 1.06 * m.stream < 1.06 * CHIPS[m.chip].bandwidth
        assert m.source.startswith("mlx#")


def test_those_of_a_chip_go_from_fast_to_slow() -> None:
    for a, b in pairwise(MEASURED):
        assert a.chip != b.chip or a.bandwidth >= b.bandwidth
