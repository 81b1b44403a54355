"""The model of a step's quantized products: measurements that it never saw, and what must be so of any model."""

from __future__ import annotations

import pytest

from cortexmlx.metal.lab.cost import products
from cortexmlx.metal.lab.cost.products import (
    CHIPS,
    MEASURED,
    MEASURED_SHAPE,
    MeasuredTime,
    matrix_work,
    mlx,
    model_8b,
    ours,
    stale,
    step,
    table,
)


def test_the_record_is_of_the_text_that_there_is() -> None:
    assert not stale()


def test_a_stale_record_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "text_digest", lambda: "another")
    assert any("has changed since" in line for line in table())


@pytest.mark.parametrize("measured", MEASURED, ids=lambda m: f"{m.rows} rows")
def test_mlx_takes_about_what_the_model_says(measured: MeasuredTime) -> None:
    """Measured on an M3 Max. Products of matrices are a few percent faster there than on the M1 of the model."""
    modelled = step(CHIPS["M3 Max"], (MEASURED_SHAPE,), mlx(measured.rows))
    assert modelled.least / 1.05 < measured.milliseconds < 1.05 * modelled.most


def test_an_8b_model_has_its_weights() -> None:
    assert sum(shape.inputs * shape.outputs for shape in model_8b()) == pytest.approx(7.5e9, rel=0.01)


def test_our_product_costs_as_much_for_each_row_of_a_tile_and_more_for_more_tiles() -> None:
    times = [step(CHIPS["M4 Max"], model_8b(), ours(rows)) for rows in (1, 8, 9, 16, 24, 25)]
    assert times[0] == times[1] and times[2] == times[3]
    assert times[1].most < times[3].most < times[4].most < times[5].most
    assert all(time.least <= time.most for time in times)


def test_sixteen_rows_take_about_half_of_what_mlx_takes() -> None:
    """41 milliseconds on an M4 Max become about 21."""
    theirs, mine = (step(CHIPS["M4 Max"], model_8b(), kind(16)) for kind in (mlx, ours))
    assert theirs.least < 41 < theirs.most and mine.least < 21 < mine.most < 0.65 * theirs.most


def test_more_than_24_rows_gain_nothing() -> None:
    theirs, mine = (step(CHIPS["M4 Max"], model_8b(), kind(32)) for kind in (mlx, ours))
    assert mine.least == pytest.approx(theirs.least) and mine.most > theirs.most


def test_mlx_multiplies_four_tiles_of_eight_for_up_to_32_rows() -> None:
    """For each 64 weights: counted in the simulator."""
    assert matrix_work()["matrix"] == 4 / 64 and matrix_work()["barrier"] > 0


def test_memory_bounds_a_chip_that_computes_faster() -> None:
    rows_of_mlx = step(CHIPS["M4 Max"], model_8b(), mlx(1))
    seconds = sum(shape.weight_bytes for shape in model_8b()) / CHIPS["M4 Max"].bandwidth / 1e9
    assert rows_of_mlx.least == pytest.approx(1000 * seconds)


def test_the_table_has_a_line_for_each_number_of_rows() -> None:
    lines = list(table())
    assert [line.split()[0] for line in lines[2:9]] == ["1", "4", "8", "9", "16", "24", "32"]
    assert len(lines) == 11 + len(MEASURED)
