"""The rule that picks a kernel, held against what a compiler makes of both."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.resources import files

import pytest

from cortexmlx.metal.lab.cost import choice
from cortexmlx.metal.lab.cost.choice import DIMS, GROUPS, candidates, issue_cycles, per_token, shapes, table
from cortexmlx.metal.lab.cost.compiled import CompiledKernel, CompilerRecord, UnusableRecord, packaged_record
from cortexmlx.metal.rules import GEOMETRIES, VARIANTS, Variant
from cortexmlx.metal.shape import DTYPES, Kernel

FEW_PERCENT = 1.05
fresh = pytest.mark.skipif(
    bool(packaged_record().stale()), reason=f"changed since it was compiled: {', '.join(packaged_record().stale())}"
)


def check(v: Variant) -> None:
    found = {c.kernel: issue_cycles(c) for c in candidates(v)}
    assert found[v.kernel] <= FEW_PERCENT * min(found.values()), v.label
    for kernel, cycles in found.items():
        assert GEOMETRIES[kernel](v).cycles == pytest.approx(cycles, rel=0.1), f"{v.label}, {kernel}"


@fresh
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_shape_is_given_to_a_kernel_that_issues_more_than_a_few_percent_more(dtype: str, dim: int) -> None:
    mine = [v for v in shapes(dtype) if v.key_dim == dim]
    assert [v.group for v in mine] == list(GROUPS)
    for v in mine:
        check(v)


@fresh
@pytest.mark.parametrize("v", [v for v in VARIANTS if v.kernel is Kernel.WIDE], ids=lambda v: v.label)
def test_the_wide_kernel_is_estimated_as_the_others_are(v: Variant) -> None:
    check(v)


def test_instructions_are_those_of_all_simdgroups_weighed_by_their_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 9 heads in two tiles and values in two parts four simdgroups do a token's work, each for 8 columns."""
    v = Variant("float16", "float16", 192, 192, 32, 9, sinks=True, forced_kernel=Kernel.MATRIX)
    name = replace(v, sinks=False).label
    kernel = CompiledKernel("paged_matrix", name, 200, 448, 0, {"matrix": 0.5, "integer": 2.0, "shuffle": 0.25})
    record = CompilerRecord("a compiler", {}, (kernel,))
    monkeypatch.setattr(choice, "packaged_record", lambda: record)
    assert per_token(v) == {"matrix": 4 * 8 * 0.5, "integer": 4 * 8 * 2.0, "shuffle": 4 * 8 * 0.25}
    assert issue_cycles(v) == pytest.approx(16 * 20.9 + 64 + 8 * 2)
    with pytest.raises(UnusableRecord, match="not in the record"):
        per_token(replace(v, forced_kernel=Kernel.VECTOR))
    cells = [line for line in table() if line.startswith("float16")]
    assert len(cells) == len(DIMS) and all(line.split()[2:] == ["-"] * 10 for line in cells)


@fresh
def test_the_readme_shows_the_choice_that_the_command_prints() -> None:
    readme = (files("cortexmlx.metal.lab") / "README.md").read_text()
    behind = readme[readme.index("`python -m cortexmlx.metal.lab.cost`") :]
    found = re.search(r"^```\n(.*?)^```$", behind, re.S | re.M)
    assert found is not None
    lines = found[1].splitlines()
    assert len(lines) > 6 and set(lines) <= set(table())
