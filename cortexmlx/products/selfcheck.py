"""Checks the quantized product on the GPU itself, against float64, at first use."""

from __future__ import annotations

from cortexmlx.attention.selfcheck import UNWRITTEN, VariantCheck, checked, difference, written
from cortexmlx.metal.products.kernel import ProductKernel
from cortexmlx.metal.products.shape import ProductShape, refusal
from cortexmlx.products.problem import make_problem


def check_product(kernel: ProductKernel, shape: ProductShape, rows: int) -> VariantCheck:
    """Run the kernel that serves a shape and a number of rows on a small problem. A problem of its is a result, not an
    exception. What was in flight before and fails raises here.
    """

    def compared() -> float:
        p = make_problem(shape, rows)
        if p.experts is None:
            got = kernel(p.shape, p.rows, p.weights, init_value=UNWRITTEN)
        else:
            got = kernel.of_experts(p.shape, p.rows, p.weights, p.experts, init_value=UNWRITTEN)
        return difference(written("product", p.shape.threads, got), p.wanted)

    return checked(shape, refusal(shape, rows), compared, judge="the product in float64")
