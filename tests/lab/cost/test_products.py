"""The model of a step's quantized products: measurements that it never saw, what must be so of any model, and the
instructions that it is made of.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cortexmlx.metal.lab.agx.compiler import CompilerOutput
from cortexmlx.metal.lab.agx.listing import UnknownListing
from cortexmlx.metal.lab.cost import products
from cortexmlx.metal.lab.cost.products import (
    CHIPS,
    MEASURED,
    MEASURED_SHAPE,
    MODELS,
    MeasuredTime,
    ProductWork,
    decode_step,
    main,
    matrix_work,
    mlx,
    model_8b,
    model_table,
    ours,
    read_count,
    stale,
    step,
    table,
    text_digest,
    workloads,
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
    assert [line.split()[0] for line in lines[2:9]] == ["1", "4", "8", "12", "16", "24", "32"]
    assert len(lines) == 11 + len(MEASURED)


@pytest.mark.parametrize(("name", "weights"), [("Qwen3-8B-4bit", 7.57e9), ("Qwen3-30B-A3B-4bit", 30.2e9)])
def test_a_model_has_its_weights_and_a_row_reads_those_that_it_chooses(name: str, weights: float) -> None:
    model, chip = MODELS[name], CHIPS["M4 Max"]
    of_layer = sum(i * o for i, o in model.matrices) + model.experts * sum(i * o for i, o in model.expert)
    assert model.layers * of_layer + model.head[0] * model.head[1] == pytest.approx(weights, rel=0.01)
    read = model.layers * (of_layer - (model.experts - model.chosen) * sum(i * o for i, o in model.expert))
    seconds = ((read + model.head[0] * model.head[1]) * 4.5 / 8 + 1000 * model.kv_bytes) / chip.bandwidth / 1e9
    assert decode_step(model, chip, 1, 1000, by_mlx=True).least == pytest.approx(1000 * seconds, rel=0.01)


def test_mlx_computes_each_row_anew_on_an_m1_and_takes_matrix_units_on_an_m5() -> None:
    model = MODELS["Qwen3-8B-4bit"]
    times = {
        (chip, rows): decode_step(model, CHIPS[chip], rows, 0, by_mlx=True)
        for chip in ("M1", "M5")
        for rows in (1, 5, 16)
    }
    assert times["M1", 5].most > 4 * times["M1", 1].most
    assert times["M5", 16].least < 1.5 * times["M5", 1].most
    assert len([*model_table()]) == 2 * 9


STATISTICS = "90 inst, 1 alu, 700 bytes, 135 regs, 8 uniforms, 0 scratch, 768 threads, 1 loops, 2:3 spills"
LOOP = """=== FINAL product main
block0 {
   r0 = get_sr #1
} -> block1
block1 {
   r4l...r5h = device_load u0:u1, r4.abs, xyzw, #0, slot 0
   r6 = simd_matrix r4, r5, r6
   r6 = simd_matrix r4, r5, r6
   r7 = ffma r4, r5, r6
} -> block1 block2
block2 {
   stop
} -> from block1
=== END
"""


def test_the_kernels_are_ours_by_tiles_and_mlxs_by_rows() -> None:
    found = list(workloads())
    assert [(work.kernel, work.rows) for work in found] == [
        *(("quantized_product", rows) for rows in (8, 16, 24)),
        ("qmv_fast", 1),
        *(("qmv_wide", rows) for rows in (2, 3, 4, 5)),
    ]
    assert "constexpr int TILES = 3;" in found[2].source and "qmv_fast_impl<T, 64, 4>(w" in found[3].source
    assert "qmv_wide_impl<T, 64, 4, 5, 8>(w" in found[7].source and "qmv_fast_impl" not in found[7].source
    assert len({work.source for work in found}) == len(found)


def test_a_turn_is_shared_out_to_its_weights() -> None:
    count = read_count(ProductWork("mine", 16, 8, ""), CompilerOutput(LOOP, STATISTICS))
    assert count.per_weight == {"fma": 1 / 8, "matrix": 2 / 8, "device load": 1 / 8}
    assert (count.half_registers, count.resident_threads, count.spills) == (135, 768, 5)


def test_a_kernel_without_a_loop_is_refused() -> None:
    with pytest.raises(UnknownListing, match="no loop"):
        read_count(
            ProductWork("mine", 16, 8, ""), CompilerOutput(LOOP.replace("block1 block2\n", "block2\n"), STATISTICS)
        )


def test_without_the_compiler_the_command_says_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(products, "find_compiler", lambda: None)
    target = tmp_path / "counts.json"
    assert main(["--record", str(target)]) == 1 and "--build" in capsys.readouterr().err and not target.exists()


def test_the_digest_is_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    before = text_digest()
    assert text_digest() == before and len(before) == 64
    texts = list(products.kernel_texts(products.ProductVariant(products.SHAPE, 8)))
    monkeypatch.setattr(products, "kernel_texts", lambda _: texts)
    assert text_digest() != before
