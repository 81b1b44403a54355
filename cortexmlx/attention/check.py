"""Checking a variant of the decode kernels on the GPU itself, against attention in float64: at first use, and for
`cortexmlx doctor`. Whatever goes wrong is told apart in words, because it happens on a machine that we do not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.attention.check_problem import WINDOW, Problem, concealed, make_problem
from cortexmlx.metal.kernels import DecodeKernels, KernelFactory
from cortexmlx.metal.rules import REDUCE_THREADS, VARIANTS, Variant, refusal

_TOLERANCE = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Largest difference of results of order 1 that rounding to the dtype explains, in sums made in float32 in any order
and with Metal's fast exponential (3 + 2 |x| units in the last place)."""

_UNWRITTEN = -24576.0
"""What outputs are filled with before a launch: a number that every dtype holds and no result of a problem can be."""

_COMPILER = ("Unable to build metal library", "Unable to load kernel", "Unable to load function")
"""How MLX's messages begin when Apple's compiler refused something; what it said follows on the next lines."""


@dataclass(frozen=True)
class VariantCheck:
    """What came of checking a variant. `error` is the largest difference from float64; None if there is no result to
    compare, and then `reason` says why. `message` is the whole text of the exception, if it was one.
    """

    variant: Variant
    error: float | None
    reason: str = ""
    message: str = ""

    @property
    def tolerance(self) -> float:
        """The largest difference that counts as agreement."""
        return _TOLERANCE[self.variant.dtype]

    @property
    def agrees(self) -> bool:
        """The kernels ran and gave what attention in float64 gives."""
        return self.error is not None and self.error <= self.tolerance

    @property
    def outcome(self) -> str:
        """The result in words, in one line."""
        if self.error is None:
            return self.reason
        verb = "agrees with" if self.agrees else "differs from"
        return f"it {verb} attention in float64 by {self.error:.2g} (limit {self.tolerance:.2g})"


class _NoResult(Exception):
    """The kernels ran, but left nothing that could be compared."""


def check_all(factory: KernelFactory) -> Iterator[VariantCheck]:
    """Check every variant of `VARIANTS`, one after the other, on kernels made by `factory`."""
    kernels = DecodeKernels(factory)
    return (check_variant(kernels, variant) for variant in VARIANTS)


def check_variant(kernels: DecodeKernels, variant: Variant) -> VariantCheck:
    """Run the kernels on rows of unequal length with a tail, with a window and without. Whatever goes wrong with them
    is a result, not an exception; what was in flight before and fails raises here.
    """
    reason = refusal(variant)
    if reason is not None:
        return VariantCheck(variant, None, f"it does not run ({reason})")
    mx.synchronize()
    try:
        problems = [make_problem(variant, window) for window in (None, WINDOW)]
        result = VariantCheck(variant, max(_error(kernels, variant, problem) for problem in problems))
        if result.agrees:
            _in_place(kernels, result, problems[0])
        return result
    except _NoResult as nothing:
        return VariantCheck(variant, None, str(nothing))
    except Exception as error:
        # A command buffer that failed is reported once more at the stream's next use: here, and not in a step.
        with suppress(Exception):
            mx.synchronize()
        text = str(error).strip()
        name = type(error).__name__
        return VariantCheck(variant, None, _in_words(name, text), f"{name}: {text}" if text else name)


def _error(kernels: DecodeKernels, variant: Variant, problem: Problem) -> float:
    """The largest difference. Each kernel is evaluated for itself, so that what is wrong has a name."""
    partials = kernels.decode(variant, problem.items, problem.inputs, init_value=_UNWRITTEN)
    _written("decode", variant.geometry.threads, partials)
    attended = kernels.reduce(variant, partials, problem.inputs, init_value=_UNWRITTEN)
    got = _written("reduce", REDUCE_THREADS, attended)
    strange = np.count_nonzero(~np.isfinite(got))
    if strange:
        raise _NoResult(f"it gives NaN or infinity in {strange:,} of {got.size:,} numbers")
    return float(np.abs(got - problem.wanted).max())


def _in_place(kernels: DecodeKernels, result: VariantCheck, problem: Problem) -> None:
    """Raise _NoResult if a launch reads a copy of the slabs. MLX makes one, and says nothing, of an input that is not
    row-contiguous, unless it is told not to.
    """
    try:
        error = _error(kernels, result.variant, replace(problem, inputs=concealed(problem.inputs)))
    except _NoResult:
        error = np.inf
    if error > result.tolerance:
        raise _NoResult(
            "its decode launch read a copy of the keys and values: of a cache of gigabytes every layer would make one"
        )


def _written(launch: str, threads: int, output: mx.array) -> npt.NDArray[np.float32]:
    """The numbers that a launch wrote. Raises _NoResult if it wrote none, or not all.

    A GPU drops a launch in silence whose threadgroups are larger than the pipeline allows, and how many it allows
    depends on the registers that the compiler took; all zeros is what a dropped launch leaves in fresh memory.
    """
    mx.eval(output)
    numbers = np.array(output.astype(mx.float32))
    left = np.count_nonzero(numbers == _UNWRITTEN)
    if left == numbers.size or not numbers.any():
        raise _NoResult(
            f"its {launch} launch was dropped: {threads} threads in a threadgroup may be more than this GPU allows for "
            f"the kernel; none of its {numbers.size:,} numbers was written"
        )
    if left:
        raise _NoResult(f"its {launch} launch left {left:,} of {numbers.size:,} numbers unwritten")
    return numbers


def _in_words(name: str, text: str) -> str:
    """An exception in one line: of a compiler's message the first error."""
    first, *rest = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if any(beginning in first for beginning in _COMPILER):
        diagnostics = [line for line in rest if "error:" in line] or rest or [first]
        return f"it does not compile ({diagnostics[0]})"
    return f"it does not run ({name}: {first})" if first else f"it does not run ({name})"
