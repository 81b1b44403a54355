"""The sheet: metal/lab/README.md shows what the commands print, and residency is counted in whole threadgroups."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files

import pytest

from cortexmlx.metal.lab.cost import choice, traffic
from cortexmlx.metal.lab.cost import sheet as sheet_module
from cortexmlx.metal.lab.cost.choice import candidates, compiled, shapes
from cortexmlx.metal.lab.cost.compiled import packaged_record
from cortexmlx.metal.lab.cost.sheet import EPILOGUE, SHAPES, compiler, resident_groups, rows, sheet
from cortexmlx.metal.rules import HALVES, VARIANTS, Variant
from cortexmlx.metal.shape import DTYPES, Kernel

ONE = Variant("bfloat16", "bfloat16", 64, 64, 32, 8)
"""What the quick tests count: the simulator compiles its kernels once."""

README = (files("cortexmlx.metal.lab") / "README.md").read_text()
fresh = pytest.mark.skipif(
    bool(packaged_record().stale()), reason=f"changed since it was compiled: {', '.join(packaged_record().stale())}"
)


def table_of(command: str) -> list[str]:
    """Return the lines of the first block of the README behind the first mention of a command."""
    behind = README[README.index(f"`python -m cortexmlx.metal.lab.{command}`") :]
    found = re.search(r"^```\n(.*?)^```$", behind, re.S | re.M)
    assert found is not None
    return found[1].splitlines()


def shown(variants: tuple[Variant, ...]) -> Iterator[Variant]:
    """The variants of which the README has the lines."""
    labels = set(table_of("cost"))
    return (v for v in variants if v.label in labels)


@fresh
def test_the_readme_shows_the_heading_and_a_line_for_each_kernel_that_the_command_prints() -> None:
    assert set(rows([ONE])) <= set(table_of("cost"))


@fresh
@pytest.mark.slow
def test_the_readme_shows_what_the_command_prints() -> None:
    mine = list(shown(SHAPES))
    assert len(mine) > 5 and {v.dtype for v in mine} == {"float16", "bfloat16"}
    assert set(table_of("cost")) == set(rows(mine))


@fresh
def test_the_readme_shows_the_choice_that_the_command_prints() -> None:
    lines = table_of("cost --choice")
    assert len(lines) > 6 and set(lines) <= set(choice.table())


@pytest.mark.slow
def test_the_readme_shows_the_traffic_that_the_command_prints() -> None:
    lines = table_of("cost.traffic")
    assert len(lines) > 4 and set(lines) <= set(traffic.table())


def test_a_core_holds_whole_threadgroups_of_registers_and_of_memory() -> None:
    assert resident_groups(448, 256, 23040) == (1, 2)
    assert resident_groups(448, 128, 11520) == (3, 5)
    assert resident_groups(1024, 256, 0) == (4, 4), "a threadgroup without memory of its own"


@fresh
def test_a_core_never_holds_fewer_threads_than_with_several_tiles_or_parts_in_a_threadgroup_of_256() -> None:
    """And where its registers are not for 512 threads, it holds more: with 16 heads of 128, and for values in parts."""
    gained = set()
    for v in {*VARIANTS, *shapes(*DTYPES)}:
        kernel, g = compiled(v), v.geometry
        if g.threadgroups > 1 and v.kernel is not Kernel.WIDE:
            assert kernel is not None
            groups = min(resident_groups(kernel.resident_threads, g.threads, g.threadgroup_bytes))
            assert groups * g.threads >= kernel.resident_threads // 256 * 256, v.label
            if groups * g.threads > kernel.resident_threads // 256 * 256:
                gained.add((v.dtype, v.key_dim, v.group))
    assert {(t, dim, 16) for t in HALVES for dim in (112, 128, 192, 256)} <= gained
    assert {("bfloat16", 192, 8), ("bfloat16", 256, 8)} <= gained


@fresh
def test_the_sheet_says_what_was_not_counted() -> None:
    lines = list(sheet([ONE]))
    assert "\n".join(lines).endswith(EPILOGUE) and EPILOGUE.startswith("Counted, not timed.")
    assert not any("not compiled" in line for line in lines)
    assert sum(line.startswith("  paged_") for line in lines) == len(candidates(ONE))


def test_a_kernel_that_was_compiled_from_another_text_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    record = packaged_record()
    stale = replace(record, texts={**record.texts, "paged_decode.metal": "0" * 64, "paged_matrix.metal": "0" * 64})
    monkeypatch.setattr(sheet_module, "packaged_record", lambda: stale)
    monkeypatch.setattr(choice, "packaged_record", lambda: stale)
    assert any(line.startswith("paged_decode.metal has changed since") for line in compiler())
    ours = [line for line in rows([ONE]) if line.startswith("  paged_")]
    assert len(ours) == len(candidates(ONE)) and all(line.endswith("not compiled") for line in ours)
