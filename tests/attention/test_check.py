"""Checking a variant of the kernels against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.attention.check import VARIANTS, check_all, check_variant
from cortexmlx.kv.spec import BLOCK_SIZES
from cortexmlx.metal import sim
from cortexmlx.metal.kernels import DecodeKernels
from cortexmlx.metal.rules import DTYPES, Variant, refusal


def test_the_check_refuses_what_no_kernel_serves() -> None:
    result = check_variant(DecodeKernels(sim.metal_kernel), Variant("float16", "float16", 512, 512, 32, 1))
    assert not result.agrees and "between 8 and 256" in result.outcome


SMALL = Variant("float32", "float32", 16, 16, 8, 2)


def damaged(damage: Callable[[mx.array], mx.array]) -> Any:
    """Kernels whose last result is damaged."""

    def factory(**options: Any) -> Any:
        kernel = sim.metal_kernel(**options)
        return lambda **call: [damage(a) for a in kernel(**call)]

    return factory


def raising(**call: Any) -> Any:
    raise RuntimeError("no such function\nand more")


@pytest.mark.parametrize("variant", [SMALL, replace(SMALL, sinks=True), replace(SMALL, softcap=True)], ids=str)
def test_kernels_that_are_right_agree(variant: Variant) -> None:
    result = check_variant(DecodeKernels(sim.metal_kernel), variant)
    assert result.agrees and result.error is not None and 0 < result.error <= result.tolerance
    assert result.outcome == f"it agrees with the reference by {result.error:.2g} (limit 0.0001)"


@pytest.mark.parametrize(
    ("damage", "error"),
    [(lambda a: a + 0.01, 0.01), (lambda a: a * mx.nan, np.inf), (lambda a: mx.zeros_like(a), None)],
    ids=["a little off", "not a number", "zeros"],
)
def test_kernels_that_are_wrong_differ(damage: Callable[[mx.array], mx.array], error: float | None) -> None:
    result = check_variant(DecodeKernels(damaged(damage)), SMALL)
    assert not result.agrees and "differs from the reference" in result.outcome
    assert result.error is not None and result.error > result.tolerance
    assert error is None or result.error >= error


def test_kernels_that_do_not_run_are_a_result_of_one_line() -> None:
    result = check_variant(DecodeKernels(lambda **options: raising), SMALL)
    assert (result.agrees, result.error) == (False, None)
    assert result.outcome == "it does not run (RuntimeError: no such function)"


def test_every_variant_that_users_see_checked_is_served_and_there_once() -> None:
    assert len(set(VARIANTS)) == len(VARIANTS) and all(refusal(v) is None for v in VARIANTS)
    assert {v.dtype for v in VARIANTS} == set(DTYPES)
    assert {v.block_size for v in VARIANTS} == set(BLOCK_SIZES)


def test_all_variants_are_checked_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Variant] = []
    monkeypatch.setattr("cortexmlx.attention.check.check_variant", lambda kernels, v: checked.append(v) or v)
    results = check_all(sim.metal_kernel)
    assert next(results) == VARIANTS[0] and len(checked) == 1, "whoever shows progress sees each as it comes"
    assert [VARIANTS[0], *results] == list(VARIANTS) == checked
