"""The kernels whose instructions for a weight are compared, and how they are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortexmlx.metal.lab.agx.compiler import CompilerOutput
from cortexmlx.metal.lab.agx.listing import UnknownListing
from cortexmlx.metal.lab.cost import products
from cortexmlx.metal.lab.cost.products import ProductWork, main, read_count, text_digest, workloads

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
    assert main([str(target)]) == 1 and "--build" in capsys.readouterr().err and not target.exists()
    assert main([]) == 2 and "FILE.json" in capsys.readouterr().err


def test_the_digest_is_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    before = text_digest()
    assert text_digest() == before and len(before) == 64
    texts = list(products.kernel_texts(products.Product(products.SHAPE, 8)))
    monkeypatch.setattr(products, "kernel_texts", lambda _: texts)
    assert text_digest() != before
