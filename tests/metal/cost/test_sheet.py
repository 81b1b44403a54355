"""The sheet: what the README shows is what the command prints, and the model orders kernels as they were measured."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import pytest

from cortexmlx.metal.compare.mlx_decode import has_two_pass_gqa
from cortexmlx.metal.cost import sheet as sheet_module
from cortexmlx.metal.cost.compiled import kept_record
from cortexmlx.metal.cost.cycles import cycles
from cortexmlx.metal.cost.published import MEASURED, TWO_PASS
from cortexmlx.metal.cost.sheet import (
    EPILOGUE,
    SHAPES,
    WIDE_SHAPES,
    calibration,
    chips,
    comparable,
    compiler,
    costs,
    modelled,
    ranking,
    sheet,
)

README = (files("cortexmlx.metal") / "README.md").read_text().splitlines()
OTHER_MLX = pytest.mark.skipif(
    "MLX's sdpa_vector.h" in kept_record().stale(), reason="the installed MLX is not the one that the README shows"
)


@OTHER_MLX
def test_the_readme_shows_what_the_command_prints_of_chips_and_measurements() -> None:
    assert [line for line in (*chips(), *calibration()) if line not in README] == []


@OTHER_MLX
@pytest.mark.parametrize(
    "shapes",
    [SHAPES[3:4], *(pytest.param(shapes, marks=pytest.mark.slow) for shapes in (SHAPES, WIDE_SHAPES))],
    ids=["one", "all", "wide"],
)
def test_the_readme_shows_what_the_command_prints_of_kernels(shapes: tuple[object, ...]) -> None:
    lines = list(costs(shapes))
    assert len(lines) > 2 + len(shapes)
    assert [line for line in lines if line not in README] == []


def test_the_model_orders_the_kernels_as_they_were_measured() -> None:
    same, tied, other = ranking()
    pairs = 21 if has_two_pass_gqa() else 16
    assert (same, tied, other) == (pairs - 1, 1, 0)


def test_one_query_head_to_eight_is_from_memory_bound_to_not() -> None:
    of_pro = {m.group: m for m in MEASURED if (m.chip, m.kernel, m.dim) == ("M5 Pro", TWO_PASS, 128)}
    assert modelled(of_pro[1]) == modelled(of_pro[4]) == 266.0
    eight, sixteen = (modelled(of_pro[group], lambda cost: cycles(cost.least)) for group in (8, 16))
    assert eight == pytest.approx(2 * sixteen, rel=1e-6)


def test_the_sheet_says_that_it_is_a_model_and_where_it_fails() -> None:
    lines = list(sheet(SHAPES[:1]))
    assert "\n".join(lines).endswith(EPILOGUE) and EPILOGUE.startswith("A model.")
    (ultra,) = (m for m in comparable() if m.chip == "M1 Ultra")
    assert modelled(ultra) > 3 * ultra.bandwidth, "a row that the model does not explain stays in the sheet"
    assert any(line.startswith("M1 Ultra") and "0.26 (memory)" in line for line in lines)


def test_a_kernel_that_was_compiled_from_another_text_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    record = kept_record()
    stale = replace(record, texts={**record.texts, "paged_decode.metal": "0" * 64})
    monkeypatch.setattr(sheet_module, "kept_record", lambda: stale)
    assert any(line.startswith("paged_decode.metal has changed since") for line in compiler())
