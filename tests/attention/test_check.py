"""Checking a variant of the kernels against the reference."""

from __future__ import annotations

from cortexmlx.attention.check import check_variant
from cortexmlx.metal import sim
from cortexmlx.metal.kernels import DecodeKernels
from cortexmlx.metal.rules import Variant


def test_the_check_refuses_what_no_kernel_serves() -> None:
    result = check_variant(DecodeKernels(sim.metal_kernel), Variant("float16", "float16", 512, 512, 32, 1))
    assert not result.agrees and "between 8 and 256" in result.outcome
