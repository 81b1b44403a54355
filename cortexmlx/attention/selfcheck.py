"""Checks each kernel variant on the GPU against attention in float64: at its first use, and for `cortexmlx doctor`.
Failures are described in words, since they happen on machines that we do not have.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.attention.selfcheck_problems import (
    NUM_NEAR_ROWS,
    ONE_PARTITION_LENGTHS,
    PREFILL_WINDOW,
    WINDOW,
    DecodeProblem,
    PrefillProblem,
    make_decode_problem,
    make_far_problem,
    make_inputs_that_expose_copies,
    make_prefill_problem,
    make_tail_problem,
)
from cortexmlx.metal import prefill, tail_write
from cortexmlx.metal.kernels import DecodeKernels
from cortexmlx.metal.prefill import PrefillKernel, PrefillVariant
from cortexmlx.metal.rules import REDUCE_THREADS, Variant, refusal
from cortexmlx.metal.tail_write import TailWriteKernel, TailWriteVariant

_TOLERANCE = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1.6e-2}
"""The largest difference of results of order 1 that rounding to the dtype explains, with sums made in float32 in any
order and Metal's fast exponential (3 + 2 |x| units in the last place).
"""

_log = logging.getLogger(__name__)

_FAR_ERROR = 0.08
"""How much more a far row may differ: a few units in the last place of a frequency turn an angle of 100,003 by 0.03. A
position that 16 bits do not hold gives errors of order 1.
"""

UNWRITTEN_VALUE = -24576.0
"""Outputs are filled with this number before a launch. Every dtype holds it, and no result of a problem can be it."""

_COMPILER_ERRORS = ("Unable to build metal library", "Unable to load kernel", "Unable to load function")
"""How MLX's messages begin when Apple's compiler refused something. The compiler's own words follow on the next
lines.
"""


class CheckedVariant(Protocol):
    """Protocol of a kernel variant that can be checked."""

    @property
    def dtype(self) -> str:
        """The dtype of the kernel's results."""

    @property
    def label(self) -> str:
        """The variant's name in tables and logs."""


@dataclass(frozen=True)
class VariantCheck:
    """The result of checking a kernel variant against float64."""

    variant: CheckedVariant
    error: float | None
    """The largest difference from float64; None if there was no result to compare."""
    reason: str = ""
    """Why there was no result."""
    message: str = ""
    """The whole text of the exception, if there was one."""
    judge: str = "attention in float64"
    """What it is compared with."""
    limit: float | None = None
    """The largest difference that counts as agreement; None: that of the dtype."""
    place: str = ""
    """Where the difference is, if its limit is not the same everywhere."""
    refused: bool = False
    """Whether a rule refuses the variant, so that it never serves."""

    @property
    def tolerance(self) -> float:
        """The largest difference that counts as agreement."""
        return _TOLERANCE[self.variant.dtype] if self.limit is None else self.limit

    @property
    def agrees(self) -> bool:
        """Whether the kernels ran and agree with float64."""
        return self.error is not None and self.error <= self.tolerance

    @property
    def outcome(self) -> str:
        """The result as one line of text."""
        if self.error is None:
            return self.reason
        verb = "agrees with" if self.agrees else "differs from"
        return f"it {verb} {self.judge} by {self.error:.2g} (limit {self.tolerance:.2g}{self.place})"


class NoResult(Exception):
    """Raised if a kernel ran, but its output cannot be compared: not written, not finite, or read from a copy."""


@dataclass(frozen=True)
class KernelCheck:
    """A check of a kernel variant, to run before the first step, on any thread. `run` launches the kernel, so that MLX
    compiles it, and compares the result with float64.
    """

    label: str
    run: Callable[[], object]


@dataclass
class KernelApproval:
    """Decides which kernel variants may be used: those that no rule refuses and, with `check`, that agree with float64.
    For any other variant, a note and one warning say why not, and that `instead` takes its place.
    """

    check: bool
    notes: dict[str, str] = field(default_factory=dict)
    serves: str = "attention"
    """What the variants compute."""
    instead: str = "the reference path"
    _decisions: dict[tuple[CheckedVariant, bool], bool] = field(default_factory=dict)

    def is_approved(self, variant: CheckedVariant, refusal: str | None, check: Callable[[], VariantCheck]) -> bool:
        """Return whether a variant may be used; `check` runs once. Several threads may ask for different variants."""
        decision_key = (variant, refusal is None)
        if decision_key not in self._decisions:
            self._decisions[decision_key] = self._decide(variant, refusal, check)
        return self._decisions[decision_key]

    def reconsider(self) -> None:
        """Forget all decisions and notes, so that each variant is checked again."""
        self._decisions.clear()
        self.notes.clear()

    def _decide(self, variant: CheckedVariant, refusal: str | None, check: Callable[[], VariantCheck]) -> bool:
        """Check a variant unless it is refused. If it may not be used, note and log the reason."""
        reason, message = refusal, ""
        if reason is None and self.check:
            result = check()
            if not result.agrees:
                reason, message = f"disabled, {result.outcome}", result.message
        if reason is None:
            return True
        if len(message.splitlines()) > 1:
            reason += "\n" + textwrap.indent(message, "  ")
        self.notes[variant.label] = reason
        _log.warning("%s (%s) runs on %s: %s", self.serves, variant.label, self.instead, reason)
        return False


def check_decode(kernels: DecodeKernels, variant: Variant) -> VariantCheck:
    """Check a decode kernel variant on rows of unequal length with a tail, with a window and without, and after 65,536
    tokens. An error of the kernel is returned as a result. A failure of earlier work in flight is raised.
    """

    def measure_error() -> float:
        problems = [make_decode_problem(variant, window) for window in (None, WINDOW)]
        error = max(_decode_error(kernels, variant, problem) for problem in problems)
        single_partition_problem = make_decode_problem(variant, None, ONE_PARTITION_LENGTHS)
        error = max(error, _single_partition_error(kernels, variant, single_partition_problem))
        error = max(error, _decode_error(kernels, variant, make_far_problem(variant)))
        if error <= _TOLERANCE[variant.dtype]:
            strided_problem = replace(problems[0], inputs=make_inputs_that_expose_copies(problems[0].inputs))
            _require_no_copy("decode", variant, lambda: _decode_error(kernels, variant, strided_problem))
        return error

    return run_check(variant, refusal(variant), measure_error)


def check_prefill(kernel: PrefillKernel, variant: PrefillVariant) -> VariantCheck:
    """Check a prefill variant on pieces of several lengths, with and without a window. Errors as in `check_decode`."""

    def measure_error() -> float:
        problems = [make_prefill_problem(variant, window) for window in (None, PREFILL_WINDOW)]
        error = max(_prefill_error(kernel, variant, problem) for problem in problems)
        if error <= _TOLERANCE[variant.dtype]:
            strided_problem = replace(problems[0], inputs=make_inputs_that_expose_copies(problems[0].inputs))
            _require_no_copy("prefill", variant, lambda: _prefill_error(kernel, variant, strided_problem))
        return error

    return run_check(variant, prefill.refusal(variant), measure_error)


def check_tail_write(kernel: TailWriteKernel, variant: TailWriteVariant) -> VariantCheck:
    """Check a tail-write kernel variant: its rotated queries, and the tails. Errors as in `check_decode`."""

    def measure_error() -> Difference:
        problem = make_tail_problem(variant)
        outputs = kernel(
            problem.new, problem.tail, problem.columns, problem.packed_positions, init_value=UNWRITTEN_VALUE
        )
        tolerance = _TOLERANCE[variant.dtype]
        near, far = Difference(0.0, tolerance), Difference(0.0, tolerance + _FAR_ERROR, " that far into a text")
        for output, expected in zip(outputs, problem.expected, strict=True):
            numbers = read_output("tail", 32, output)
            near = near.with_error_at_least(max_difference(numbers[:NUM_NEAR_ROWS], expected[:NUM_NEAR_ROWS]))
            far = far.with_error_at_least(max_difference(numbers[NUM_NEAR_ROWS:], expected[NUM_NEAR_ROWS:]))
        return max(near, far, key=lambda difference: difference.error / difference.limit)

    return run_check(variant, tail_write.refusal(variant), measure_error)


@dataclass(frozen=True)
class Difference:
    """The largest difference of some results from float64, and the limit that holds for them."""

    error: float
    limit: float
    place: str = ""

    def with_error_at_least(self, error: float) -> Difference:
        """Return this difference with the larger of its own error and `error`."""
        return replace(self, error=max(self.error, error))


def run_check(
    variant: CheckedVariant,
    reason: str | None,
    measure_error: Callable[[], float | Difference],
    judge: str = "attention in float64",
) -> VariantCheck:
    """Run a check and return its result. With a `reason` why the variant is refused, nothing runs. `measure_error` runs
    the variant and returns its largest difference from the correct result, which `judge` names in messages.
    """
    if reason is not None:
        return VariantCheck(variant, None, f"it does not run ({reason})", refused=True)
    mx.synchronize()
    try:
        found = measure_error()
        if isinstance(found, Difference):
            return VariantCheck(variant, found.error, judge=judge, limit=found.limit, place=found.place)
        return VariantCheck(variant, found, judge=judge)
    except NoResult as nothing:
        return VariantCheck(variant, None, str(nothing))
    except Exception as error:
        # A command buffer that failed is reported once more at the stream's next use: here, and not in a step.
        with suppress(Exception):
            mx.synchronize()
        text = str(error).strip()
        name = type(error).__name__
        return VariantCheck(variant, None, _summarize_exception(name, text), f"{name}: {text}" if text else name)


def _decode_error(kernels: DecodeKernels, variant: Variant, problem: DecodeProblem) -> float:
    """Return the largest error of decode and reduce kernel. They run one by one, so that an exception names one."""
    partials = kernels.decode(variant, problem.items, problem.inputs, init_value=UNWRITTEN_VALUE)
    read_output("decode", variant.geometry.threads, partials)
    output = kernels.reduce(variant, partials, problem.inputs, init_value=UNWRITTEN_VALUE)
    return max_difference(read_output("reduce", REDUCE_THREADS, output), problem.expected)


def _single_partition_error(kernels: DecodeKernels, variant: Variant, problem: DecodeProblem) -> float:
    """Return the largest error of the decode kernel on rows of one partition each, which need no reduce kernel."""
    output = kernels.decode_and_reduce(variant, problem.items, problem.inputs, init_value=UNWRITTEN_VALUE)
    return max_difference(read_output("decode", variant.geometry.threads, output), problem.expected)


def _prefill_error(kernel: PrefillKernel, variant: PrefillVariant, problem: PrefillProblem) -> float:
    """Return the largest error of the prefill kernel."""
    output = kernel(variant, problem.items, problem.inputs, init_value=UNWRITTEN_VALUE)
    return max_difference(read_output("prefill", variant.threads, output), problem.expected)


def max_difference(result: npt.NDArray[np.float32], expected: npt.NDArray[np.float64]) -> float:
    """Return the largest absolute difference. Raises NoResult if a number is NaN or infinite."""
    non_finite_count = np.count_nonzero(~np.isfinite(result))
    if non_finite_count:
        raise NoResult(f"it gives NaN or infinity in {non_finite_count:,} of {result.size:,} numbers")
    return float(np.abs(result - expected).max())


def _require_no_copy(launch: str, variant: CheckedVariant, strided_error: Callable[[], float]) -> None:
    """Raise NoResult if a launch copies slabs that are not row-contiguous, which makes `strided_error()` large."""
    try:
        error = strided_error()
    except NoResult:
        error = np.inf
    if error > _TOLERANCE[variant.dtype]:
        raise NoResult(
            f"its {launch} launch read a copy of the keys and values: of a cache of gigabytes every layer would make "
            "one"
        )


def read_output(launch: str, threads: int, output: mx.array) -> npt.NDArray[np.float32]:
    """Return the numbers that a launch wrote. Raises NoResult if it wrote none, or not all.

    A GPU silently drops a launch whose threadgroups are larger than the pipeline allows, which depends on the registers
    that the compiler took. A dropped launch leaves all zeros in fresh memory.
    """
    mx.eval(output)
    numbers = np.array(output.astype(mx.float32))
    unwritten_count = np.count_nonzero(numbers == UNWRITTEN_VALUE)
    if unwritten_count == numbers.size or not numbers.any():
        raise NoResult(
            f"its {launch} launch was dropped: {threads} threads in a threadgroup may be more than this GPU allows for "
            f"the kernel; none of its {numbers.size:,} numbers was written"
        )
    if unwritten_count:
        raise NoResult(f"its {launch} launch left {unwritten_count:,} of {numbers.size:,} numbers unwritten")
    return numbers


def _summarize_exception(name: str, text: str) -> str:
    """Return an exception in one line; for a compiler's message, the first error."""
    first, *rest = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if any(prefix in first for prefix in _COMPILER_ERRORS):
        diagnostics = [line for line in rest if "error:" in line] or rest or [first]
        return f"it does not compile ({diagnostics[0]})"
    return f"it does not run ({name}: {first})" if first else f"it does not run ({name})"
