"""How far something is, as a program reads it."""

from __future__ import annotations

import pytest

from cortexmlx import Progress


@pytest.mark.parametrize(
    ("progress", "unit", "fraction"),
    [
        (Progress("downloading", 0, 0), "bytes", 0.0),
        (Progress("downloading", 11, 10), "bytes", 1.0),
        (Progress("loading", 1, 4), "steps", 0.25),
        (Progress("prefilling", 3000, 4000, cached=1000), "tokens", 0.75),
    ],
)
def test_a_share_is_between_nothing_and_all_and_its_unit_is_known(
    progress: Progress, unit: str, fraction: float
) -> None:
    assert (progress.unit, progress.fraction) == (unit, fraction)
