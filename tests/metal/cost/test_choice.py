"""The rule that picks a kernel, held against the sheet: the other would not do with much less."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import pytest

from cortexmlx.metal.cost.choice import DIMS, GROUPS, shapes, spent, table
from cortexmlx.metal.cost.compiled import kept_record
from cortexmlx.metal.rules import GEOMETRIES, VARIANTS, Variant, refusal
from cortexmlx.metal.shape import DTYPES, Kernel

FEW_PERCENT = 1.05
BOUNDARY = [Variant("float16", "float16", dim, dim, 32, 4) for dim in (64, 128)]
"""The cheaper kernel is the one for the first, and the other for the second."""

pytestmark = pytest.mark.skipif(
    bool(kept_record().stale()), reason=f"changed since it was compiled: {', '.join(kept_record().stale())}"
)


def check(v: Variant) -> None:
    found = spent(v)
    assert v.kernel in found and set(found) == {k for k in Kernel if refusal(replace(v, forced=k)) is None}
    assert found[v.kernel] <= FEW_PERCENT * min(found.values()), v.label
    for kernel, cycles in found.items():
        assert GEOMETRIES[kernel](v).cycles == pytest.approx(cycles, rel=0.1), f"{v.label}, {kernel}"


@pytest.mark.slow
def test_the_cheaper_kernel_serves_on_both_sides_of_the_boundary() -> None:
    assert [v.kernel for v in BOUNDARY] == [Kernel.MATRIX, Kernel.VECTOR]
    for v in BOUNDARY:
        check(v)


@pytest.mark.slow
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_shape_is_given_to_a_kernel_that_spends_more_than_a_few_percent_more(dtype: str, dim: int) -> None:
    record = kept_record()
    mine = [v for v in shapes(dtype) if v.key_dim == dim]
    assert [v.group for v in mine] == list(GROUPS)
    for v in mine:
        assert record.find(v.geometry.name, v.label) is not None
        check(v)


@pytest.mark.slow
@pytest.mark.parametrize("v", [v for v in VARIANTS if v.kernel is Kernel.WIDE], ids=lambda v: v.label)
def test_the_wide_kernel_is_estimated_as_the_others_are(v: Variant) -> None:
    check(v)


@pytest.mark.slow
def test_the_readme_shows_what_the_command_prints() -> None:
    readme = (files("cortexmlx.metal") / "README.md").read_text().splitlines()
    assert [line for line in table() if line not in readme] == []
