"""Checks a kernel variant on the GPU itself, against attention in float64: at first use, and for `cortexmlx doctor`.
What goes wrong is described in words, because it happens on a machine that we do not have.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.attention.selfcheck_problems import (
    PREFILL_WINDOW,
    WHOLE_LENGTHS,
    WINDOW,
    DecodeProblem,
    PrefillProblem,
    concealed,
    make_prefill_problem,
    make_problem,
    make_tail_problem,
)
from cortexmlx.metal import prefill, tail_write
from cortexmlx.metal.kernels import DecodeKernels, KernelFactory
from cortexmlx.metal.prefill import PREFILL_VARIANTS, PrefillKernel, PrefillVariant
from cortexmlx.metal.rules import REDUCE_THREADS, VARIANTS, Variant, refusal
from cortexmlx.metal.tail_write import WRITES, TailWrite, TailWriteKernel

_TOLERANCE = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1.6e-2}
"""The largest difference of results of order 1 that rounding to the dtype explains, with sums made in float32 in any
order and Metal's fast exponential (3 + 2 |x| units in the last place).
"""

_log = logging.getLogger(__name__)

UNWRITTEN = -24576.0
"""Outputs are filled with this number before a launch. Every dtype holds it, and no result of a problem can be it."""

_COMPILER = ("Unable to build metal library", "Unable to load kernel", "Unable to load function")
"""How MLX's messages begin when Apple's compiler refused something. The compiler's own words follow on the next
lines.
"""


class Checked(Protocol):
    """A kernel's variant."""

    @property
    def dtype(self) -> str:
        """The dtype of its results."""

    @property
    def label(self) -> str:
        """Its name in a line of a table or a log."""


@dataclass(frozen=True)
class VariantCheck:
    """The result of checking a variant."""

    variant: Checked
    error: float | None
    """The largest difference from float64; None if there was no result to compare."""
    reason: str = ""
    """Why there was no result."""
    message: str = ""
    """The whole text of the exception, if there was one."""
    judge: str = "attention in float64"
    """What it is compared with."""

    @property
    def tolerance(self) -> float:
        """The largest difference that counts as agreement."""
        return _TOLERANCE[self.variant.dtype]

    @property
    def agrees(self) -> bool:
        """Whether the kernels ran and agree with attention in float64."""
        return self.error is not None and self.error <= self.tolerance

    @property
    def outcome(self) -> str:
        """The result in words, in one line."""
        if self.error is None:
            return self.reason
        verb = "agrees with" if self.agrees else "differs from"
        return f"it {verb} {self.judge} by {self.error:.2g} (limit {self.tolerance:.2g})"


class NoResult(Exception):
    """The kernels ran, but left nothing to compare."""


@dataclass(frozen=True)
class KernelCheck:
    """A kernel variant that a model needs, to be compiled and checked before its first use. `run` does both, on any
    thread: MLX compiles a kernel when a launch is evaluated, and the launches of a thread are its own.
    """

    label: str
    run: Callable[[], object]


@dataclass
class Approval:
    """Which variants may serve: those that no rule refuses and, with `check`, that agree with float64. For any other
    there is a note and one warning, and the reference path serves instead.
    """

    check: bool
    notes: dict[str, str] = field(default_factory=dict)
    serves: str = "attention"
    """What the variants compute."""
    instead: str = "the reference path"
    _known: dict[tuple[Checked, bool], bool] = field(default_factory=dict)

    def of(self, variant: Checked, refusal: str | None, check: Callable[[], VariantCheck]) -> bool:
        """Return whether the variant may serve; `check` compares it, once. Several threads may ask for different
        variants.
        """
        asked = (variant, refusal is None)
        if asked not in self._known:
            self._known[asked] = self._found(variant, refusal, check)
        return self._known[asked]

    def reconsider(self) -> None:
        """Forget all that was found."""
        self._known.clear()
        self.notes.clear()

    def _found(self, variant: Checked, refusal: str | None, check: Callable[[], VariantCheck]) -> bool:
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


def check_all(factory: KernelFactory) -> Iterator[VariantCheck]:
    """Check every variant of `VARIANTS`, `PREFILL_VARIANTS` and `WRITES`, one after the other, on kernels made by
    `factory`.
    """
    kernels, kernel, writes = DecodeKernels(factory), PrefillKernel(factory), TailWriteKernel(factory)
    yield from (check_variant(kernels, variant) for variant in VARIANTS)
    yield from (check_prefill(kernel, variant) for variant in PREFILL_VARIANTS)
    yield from (check_tail_write(writes, variant) for variant in WRITES)


def check_variant(kernels: DecodeKernels, variant: Variant) -> VariantCheck:
    """Run the kernels on rows of unequal length with a tail, with a window and without. A problem of theirs is a
    result, not an exception. What was in flight before and fails raises here.
    """

    def compared() -> float:
        problems = [make_problem(variant, window) for window in (None, WINDOW)]
        error = max(_error(kernels, variant, problem) for problem in problems)
        error = max(error, _whole_error(kernels, variant, make_problem(variant, None, WHOLE_LENGTHS)))
        if error <= _TOLERANCE[variant.dtype]:
            _in_place(
                "decode",
                variant,
                lambda: _error(kernels, variant, replace(problems[0], inputs=concealed(problems[0].inputs))),
            )
        return error

    return checked(variant, refusal(variant), compared)


def check_prefill(kernel: PrefillKernel, variant: PrefillVariant) -> VariantCheck:
    """Do the same with the prefill kernel, on pieces that begin and end anywhere."""

    def compared() -> float:
        problems = [make_prefill_problem(variant, window) for window in (None, PREFILL_WINDOW)]
        error = max(_prefill_error(kernel, variant, problem) for problem in problems)
        if error <= _TOLERANCE[variant.dtype]:
            given = replace(problems[0], inputs=concealed(problems[0].inputs))
            _in_place("prefill", variant, lambda: _prefill_error(kernel, variant, given))
        return error

    return checked(variant, prefill.refusal(variant), compared)


def check_tail_write(kernel: TailWriteKernel, variant: TailWrite) -> VariantCheck:
    """Do the same with the kernel that writes the tail: its rotated queries, and the tails."""

    def compared() -> float:
        problem = make_tail_problem(variant)
        made = kernel(problem.new, problem.tail, problem.columns, problem.places, init_value=UNWRITTEN)
        each = zip(made, problem.wanted, strict=True)
        return max(difference(written("tail", 32, array), wanted) for array, wanted in each)

    return checked(variant, tail_write.refusal(variant), compared)


def checked(
    variant: Checked, reason: str | None, compared: Callable[[], float], judge: str = "attention in float64"
) -> VariantCheck:
    """Return the result of a check. `reason` says why the variant does not run. `compared` runs it and returns the
    largest difference from what `judge` says.
    """
    if reason is not None:
        return VariantCheck(variant, None, f"it does not run ({reason})")
    mx.synchronize()
    try:
        return VariantCheck(variant, compared(), judge=judge)
    except NoResult as nothing:
        return VariantCheck(variant, None, str(nothing))
    except Exception as error:
        # A command buffer that failed is reported once more at the stream's next use: here, and not in a step.
        with suppress(Exception):
            mx.synchronize()
        text = str(error).strip()
        name = type(error).__name__
        return VariantCheck(variant, None, _in_words(name, text), f"{name}: {text}" if text else name)


def _error(kernels: DecodeKernels, variant: Variant, problem: DecodeProblem) -> float:
    """Return the largest difference. Each kernel is evaluated by itself, so that a problem has a name."""
    partials = kernels.decode(variant, problem.items, problem.inputs, init_value=UNWRITTEN)
    written("decode", variant.geometry.threads, partials)
    attended = kernels.reduce(variant, partials, problem.inputs, init_value=UNWRITTEN)
    return difference(written("reduce", REDUCE_THREADS, attended), problem.wanted)


def _whole_error(kernels: DecodeKernels, variant: Variant, problem: DecodeProblem) -> float:
    """Return the largest difference of the kernel that leaves the rows' results."""
    attended = kernels.whole(variant, problem.items, problem.inputs, init_value=UNWRITTEN)
    return difference(written("decode", variant.geometry.threads, attended), problem.wanted)


def _prefill_error(kernel: PrefillKernel, variant: PrefillVariant, problem: PrefillProblem) -> float:
    """Return the largest difference of the prefill kernel's result."""
    attended = kernel(variant, problem.items, problem.inputs, init_value=UNWRITTEN)
    return difference(written("prefill", variant.threads, attended), problem.wanted)


def difference(got: npt.NDArray[np.float32], wanted: npt.NDArray[np.float64]) -> float:
    """Return the largest difference. Raises NoResult if a number is NaN or infinite."""
    strange = np.count_nonzero(~np.isfinite(got))
    if strange:
        raise NoResult(f"it gives NaN or infinity in {strange:,} of {got.size:,} numbers")
    return float(np.abs(got - wanted).max())


def _in_place(launch: str, variant: Checked, concealed_error: Callable[[], float]) -> None:
    """Raise NoResult if a launch reads a copy of the slabs. MLX silently copies an input that is not row-contiguous,
    unless it is told not to.
    """
    try:
        error = concealed_error()
    except NoResult:
        error = np.inf
    if error > _TOLERANCE[variant.dtype]:
        raise NoResult(
            f"its {launch} launch read a copy of the keys and values: of a cache of gigabytes every layer would make "
            "one"
        )


def written(launch: str, threads: int, output: mx.array) -> npt.NDArray[np.float32]:
    """Return the numbers that a launch wrote. Raises NoResult if it wrote none, or not all.

    A GPU silently drops a launch whose threadgroups are larger than the pipeline allows, which depends on the registers
    that the compiler took. A dropped launch leaves all zeros in fresh memory.
    """
    mx.eval(output)
    numbers = np.array(output.astype(mx.float32))
    left = np.count_nonzero(numbers == UNWRITTEN)
    if left == numbers.size or not numbers.any():
        raise NoResult(
            f"its {launch} launch was dropped: {threads} threads in a threadgroup may be more than this GPU allows for "
            f"the kernel; none of its {numbers.size:,} numbers was written"
        )
    if left:
        raise NoResult(f"its {launch} launch left {left:,} of {numbers.size:,} numbers unwritten")
    return numbers


def _in_words(name: str, text: str) -> str:
    """Return an exception in one line. Of a compiler's message it is the first error."""
    first, *rest = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if any(beginning in first for beginning in _COMPILER):
        diagnostics = [line for line in rest if "error:" in line] or rest or [first]
        return f"it does not compile ({diagnostics[0]})"
    return f"it does not run ({name}: {first})" if first else f"it does not run ({name})"
