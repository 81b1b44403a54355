"""Checking a variant of the kernels: what is right agrees, and every way of being wrong is told in its own words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.attention.selfcheck import check_decode, check_prefill, check_tail_write
from cortexmlx.metal.kernels import DecodeKernels
from cortexmlx.metal.lab import sim
from cortexmlx.metal.prefill import PrefillKernel, PrefillVariant
from cortexmlx.metal.rules import Variant
from cortexmlx.metal.shape import Kernel
from cortexmlx.metal.tail_write import WRITES, TailWriteKernel, TailWriteVariant
from support.kernels.broken_kernels import (
    COMPILE_ERROR,
    GPU_TIMEOUT,
    TOO_MANY_THREADS,
    broken,
    copying,
    damaged,
    dropped,
    raising,
)

pytestmark = pytest.mark.lab  # kernels are executed


SMALL = Variant("float32", "float32", 16, 16, 8, 2)
PREFILL = PrefillVariant("float32", "float32", 16, 16, 8, 2)


def outcome(factory: Any, variant: Variant = SMALL) -> str:
    """What is said of kernels that must not be used."""
    result = check_decode(DecodeKernels(factory), variant)
    assert not result.agrees
    return result.outcome


def test_the_check_refuses_what_no_kernel_serves() -> None:
    assert "between 8 and 256" in outcome(sim.metal_kernel, Variant("float16", "float16", 16, 4, 32, 1))


@pytest.mark.parametrize(
    "variant",
    [
        SMALL,
        replace(SMALL, sinks=True),
        replace(SMALL, softcap=True),
        replace(SMALL, alibi=True),
        replace(SMALL, dtype="bfloat16", kv_dtype="bfloat16"),
        replace(SMALL, key_dim=64, value_dim=32, latent=True),
    ],
    ids=str,
)
def test_kernels_that_are_right_agree(variant: Variant) -> None:
    result = check_decode(DecodeKernels(sim.metal_kernel), variant)
    assert result.agrees and result.error is not None and 0 < result.error <= result.tolerance
    assert result.outcome == (
        f"it agrees with attention in float64 by {result.error:.2g} (limit {result.tolerance:.2g})"
    )


def test_a_gpu_whose_float32_products_are_coarse_does_not_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """An M5 multiplies float32 matrices in TF32: whatever MLX computes there is no measure of the kernels."""

    def coarse(product: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(a: mx.array, b: mx.array, *more: Any, **options: Any) -> mx.array:
            a, b = (x.astype(mx.bfloat16).astype(x.dtype) for x in (a, b))
            return product(a, b, *more, **options)

        return call

    for name in ("matmul", "gather_mm"):
        monkeypatch.setattr(mx, name, coarse(getattr(mx, name)))
    monkeypatch.setattr(mx.array, "__matmul__", coarse(mx.matmul))
    assert check_decode(DecodeKernels(sim.metal_kernel), SMALL).agrees


@pytest.mark.parametrize(
    ("damage", "error"),
    [(lambda a: a + 0.01, 0.01), (lambda a: a * 1.001, 0.001)],
    ids=["a hundredth off", "a thousandth off"],
)
def test_kernels_that_are_a_little_wrong_differ(damage: Callable[[mx.array], mx.array], error: float) -> None:
    result = check_decode(DecodeKernels(damaged(damage, "reduce")), SMALL)
    assert not result.agrees and "it differs from attention in float64 by" in result.outcome
    assert result.error is not None and result.error >= error


@pytest.mark.parametrize("strange", [np.nan, np.inf])
def test_results_that_are_no_numbers_are_counted(strange: float) -> None:
    said = outcome(damaged(lambda a: mx.where(mx.arange(a.size).reshape(a.shape) % 4 == 0, strange, a), "reduce"))
    assert said == "it gives NaN or infinity in 64 of 256 numbers"


@pytest.mark.parametrize("zeros", [False, True], ids=["as it was initialised", "zeros"])
@pytest.mark.parametrize(("only", "threads"), [("decode", 256), ("reduce", 128)])
def test_a_launch_that_was_dropped_is_called_so(only: str, threads: int, zeros: bool) -> None:
    """A GPU drops a launch of more threads than the pipeline allows, in silence."""
    variant = replace(SMALL, group=2)
    assert variant.geometry.threads == 256
    said = outcome(dropped(only, zeros=zeros), variant)
    assert said.startswith(f"its {only} launch was dropped: {threads} threads in a threadgroup")
    assert "none of its" in said and "was written" in said


def test_a_kernel_that_does_not_compile_says_the_compilers_first_error_and_keeps_the_rest() -> None:
    result = check_decode(DecodeKernels(raising(RuntimeError(COMPILE_ERROR))), SMALL)
    assert (result.agrees, result.error) == (False, None)
    assert result.outcome == (
        "it does not compile (program_source:412:14: error: cannot initialize a variable of type 'device float *' "
        "with an rvalue of type 'threadgroup float *')"
    )
    assert result.message == f"RuntimeError: {COMPILE_ERROR.strip()}"


def test_a_launch_that_mlx_refuses_is_not_a_compile_error() -> None:
    said = outcome(raising(ValueError(TOO_MANY_THREADS), "reduce"))
    assert said == f"it does not run (ValueError: {TOO_MANY_THREADS})"


def test_an_error_that_comes_at_the_evaluation_is_a_result_and_does_not_stay_on_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hang or a bad address shows when the command buffer ends, and MLX raises it again at the stream's next use."""
    pending: list[str] = []
    evaluate, synchronize = mx.eval, mx.synchronize

    def late(kernel: Any, call: dict[str, Any]) -> list[mx.array]:
        pending.append(GPU_TIMEOUT)
        return list(kernel(**call))

    def evaluated(*arrays: Any) -> None:
        if pending:
            raise RuntimeError(pending[0])
        evaluate(*arrays)

    def synchronized(*stream: Any) -> None:
        synchronize(*stream)
        if pending:
            raise RuntimeError(pending.pop())

    monkeypatch.setattr(mx, "eval", evaluated)
    monkeypatch.setattr(mx, "synchronize", synchronized)
    said = outcome(broken(late, "decode"))
    assert said == f"it does not run (RuntimeError: {GPU_TIMEOUT})"
    assert not pending


def test_an_error_of_what_was_in_flight_before_is_not_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(*stream: Any) -> None:
        raise RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory.")

    monkeypatch.setattr(mx, "synchronize", synchronize)
    with pytest.raises(RuntimeError, match="Insufficient Memory"):
        check_decode(DecodeKernels(sim.metal_kernel), SMALL)


@pytest.mark.parametrize("all_inputs", [False, True], ids=["as MLX does by default", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_launch_that_reads_copies_of_the_slabs_is_noticed(dtype: str, all_inputs: bool) -> None:
    """It computes what is right; but of a slab of gigabytes nobody wants a copy in every layer of every step."""
    said = outcome(copying(all_inputs=all_inputs), replace(SMALL, dtype=dtype, kv_dtype=dtype))
    assert said == (
        "its decode launch read a copy of the keys and values: of a cache of gigabytes every layer would make one"
    )


def test_an_interrupt_is_no_result() -> None:
    def interrupt(kernel: Any, call: dict[str, Any]) -> list[mx.array]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_decode(DecodeKernels(broken(interrupt)), SMALL)


def test_the_error_is_the_largest_over_all_problems() -> None:
    """The second problem has a window: kernels that are wrong only there are found."""
    launches = 0

    def second(kernel: Any, call: dict[str, Any]) -> list[mx.array]:
        nonlocal launches
        launches += 1
        return [a + (0.5 if launches == 2 else 0.0) for a in kernel(**call)]

    result = check_decode(DecodeKernels(broken(second, "reduce")), SMALL)
    assert launches == 3 and result.error is not None and np.isclose(result.error, 0.5, atol=1e-3)


@pytest.mark.parametrize(
    "variant",
    [PREFILL, replace(PREFILL, sinks=True, softcap=True), replace(PREFILL, dtype="bfloat16", kv_dtype="bfloat16")],
    ids=lambda v: v.label,
)
def test_a_prefill_kernel_that_is_right_agrees(variant: PrefillVariant) -> None:
    result = check_prefill(PrefillKernel(sim.metal_kernel), variant)
    assert result.agrees and result.error is not None and 0 < result.error <= result.tolerance


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (damaged(lambda a: a * 1.001), "differs from attention in float64"),
        (damaged(lambda a: mx.where(mx.arange(a.shape[0])[:, None, None, None] == 70, mx.nan, a)), "NaN or infinity"),
        (dropped("prefill", zeros=True), "its prefill launch was dropped: 256 threads"),
        (copying(all_inputs=False), "its prefill launch read a copy"),
    ],
    ids=["a thousandth off", "not a number", "dropped", "copies"],
)
def test_a_prefill_kernel_that_is_wrong_does_not(factory: Any, says: str) -> None:
    result = check_prefill(PrefillKernel(factory), PREFILL)
    assert not result.agrees and says in result.outcome


def test_the_check_refuses_what_the_prefill_kernel_does_not_serve() -> None:
    assert "matrices of 8" in check_prefill(PrefillKernel(sim.metal_kernel), replace(PREFILL, key_dim=20)).outcome


@pytest.mark.parametrize("dtype", ["half", "bfloat"])
@pytest.mark.parametrize("variant", [WRITES[0], WRITES[-1]], ids=lambda v: v.label)
def test_positions_that_16_bits_do_not_hold_are_looked_at(variant: TailWriteVariant, dtype: str) -> None:
    right, wrong = "return rotation.position * turn", f"return float({dtype}(rotation.position)) * turn"

    def factory(*, header: str, **options: Any) -> Any:
        assert right in header
        return sim.metal_kernel(header=header.replace(right, wrong), **options)

    assert check_tail_write(TailWriteKernel(sim.metal_kernel), variant).agrees
    assert not check_tail_write(TailWriteKernel(factory), variant).agrees


@pytest.mark.parametrize(("off", "says"), [(0.05, "agrees with"), (0.5, "differs from")])
def test_differences_far_into_a_text_are_told_as_they_are(off: float, says: str) -> None:
    """They have a larger limit, and are no smaller for it."""

    def far_rows(kernel: Any, call: dict[str, Any]) -> list[mx.array]:
        queries, *tails = kernel(**call)
        return [queries + mx.where(mx.arange(4)[:, None, None, None] == 3, off, 0.0).astype(queries.dtype), *tails]

    check = check_tail_write(TailWriteKernel(broken(far_rows)), WRITES[0])
    assert check.agrees is (off < 0.08) and check.error is not None and abs(check.error - off) < 0.02
    limit = 0.08 + {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1.6e-2}[WRITES[0].dtype]
    assert (
        check.outcome == f"it {says} attention in float64 by {check.error:.2g} (limit {limit:.2g} that far into a text)"
    )


@pytest.mark.parametrize(("kernel", "token"), [(Kernel.VECTOR, "token"), (Kernel.MATRIX, "looked_up")])
def test_tokens_that_16_bits_do_not_count_are_looked_at(kernel: Kernel, token: str) -> None:
    """Beyond a window, so that few are computed."""
    variant = replace(SMALL, key_dim=64, value_dim=64, group=3, forced_kernel=kernel)
    right, wrong = f"block_table[{token} / BLOCK_SIZE]", f"block_table[ushort({token}) / BLOCK_SIZE]"

    def factory(*, header: str, **options: Any) -> Any:
        return sim.metal_kernel(header=header.replace(right, wrong), **options)

    assert check_decode(DecodeKernels(sim.metal_kernel), variant).agrees
    assert not check_decode(DecodeKernels(factory), variant).agrees
