"""The self-check of the quantized matmul: what is right agrees, and what can go wrong on a GPU is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.matmul.selfcheck import check_matmul
from cortexmlx.metal.kernels import minify
from cortexmlx.metal.lab import sim
from cortexmlx.metal.matmul.kernel import MatmulKernel
from cortexmlx.metal.matmul.shape import MatmulShape

SHAPE = MatmulShape("float16", "affine", 4, 64, 256, 5000)
EXPERTS = replace(SHAPE, mode="mxfp4", group=32, inputs=128, experts=128)


LARGE = replace(SHAPE, inputs=4096)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [(SHAPE, 9), (EXPERTS, 48), (LARGE, 8), (replace(LARGE, dtype="bfloat16", experts=8), 16)],
    ids=["one matrix", "experts", "many inputs", "large activations"],
)
def test_the_kernel_agrees(shape: MatmulShape, rows: int) -> None:
    check = check_matmul(MatmulKernel(sim.metal_kernel), shape, rows)
    assert check.agrees and "agrees with the matmul in float64" in check.outcome


@pytest.mark.parametrize(("shape", "rows"), [(SHAPE, 9), (EXPERTS, 48)], ids=["one matrix", "experts"])
@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("T(sum)", "T(1.05f * sum)", "differs from the matmul in float64"),
        ("T(sum)", "T(sum / 0.0f)", "NaN or infinity"),
        ("t * 8 + row < rows.count &&", "t * 8 + row < rows.count - 1 &&", "unwritten"),
        ("T(sum);", "T(never);", "does not compile"),
    ],
)
def test_a_wrong_kernel_is_found(shape: MatmulShape, rows: int, right: str, wrong: str, said: str) -> None:
    def factory(*, header: str, **options: Any) -> Any:
        assert right in header
        return sim.metal_kernel(header=header.replace(right, wrong), **options)

    check = check_matmul(MatmulKernel(factory), shape, rows)
    said = "does not run" if said == "does not compile" else said  # the simulator's words are not Apple's
    assert not check.agrees and said in check.outcome


LAST_BARRIER = "    threadgroup_barrier(mem_flags::mem_threadgroup);\n  }\n}"


@pytest.mark.parametrize(
    ("shape", "rows", "right", "wrong", "said"),
    [
        (LARGE, 8, "uint(row) * groups * GROUP", "uint(ushort(uint(row) * groups * GROUP))", "differs from"),
        (replace(LARGE, experts=8), 16, "uint(row) * groups * GROUP", "uint(short(uint(row) * groups * GROUP))", ""),
        (
            replace(LARGE, dtype="bfloat16"),
            8,
            "numbers[t][w * RUN + k].thread_elements()[e] = loaded[k]",
            "numbers[t][w * RUN + k].thread_elements()[e] = T(half(loaded[k]))",
            "NaN or infinity",
        ),
        (replace(LARGE, experts=8), 16, LAST_BARRIER, f"if (t + 1 < TILES) {LAST_BARRIER.strip()}", "race"),
    ],
    ids=["offsets of 16 bits", "signed offsets", "rows as halves", "no barrier after the last tile"],
)
def test_what_shows_only_in_large_products_is_found(
    shape: MatmulShape, rows: int, right: str, wrong: str, said: str
) -> None:
    def factory(*, header: str, **options: Any) -> Any:
        right_text, wrong_text = minify(right), minify(wrong)
        assert right_text in header
        return sim.metal_kernel(header=header.replace(right_text, wrong_text), **options)

    check = check_matmul(MatmulKernel(factory), shape, rows)
    assert not check.agrees and said in f"{check.outcome} {check.message}"


def test_a_dropped_launch_is_found() -> None:
    """Outputs stay what they were filled with."""

    def factory(**_: Any) -> Any:
        def call(*, output_shapes: Any, output_dtypes: Any, init_value: float, **_: Any) -> list[mx.array]:
            return [mx.full(output_shapes[0], init_value, output_dtypes[0])]

        return call

    assert "launch was dropped" in check_matmul(MatmulKernel(factory), SHAPE, 9).outcome


def test_what_is_not_served_does_not_run() -> None:
    check = check_matmul(MatmulKernel(sim.metal_kernel), replace(SHAPE, bits=5), 9)
    assert not check.agrees and "4 and 8 bits" in check.outcome
