"""What a judged kernel is: a name, a run that returns its result and the expected one, and how far they may differ."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.errors import CortexError

from .. import settings
from ..report import Fault

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Case:
    """One known-good kernel in one shape.

    `run` returns (simulated, expected); `tolerance` is relative to the largest value.
    `unordered` says why a kernel has races by the language's rules: it runs in lockstep and they are let pass.
    """

    group: str
    name: str
    run: Callable[[], tuple[Floats, Floats]]
    tolerance: float
    unordered: str = ""


@dataclass(frozen=True)
class Skipped:
    """A kernel that cannot be judged here, and why."""

    group: str
    name: str
    reason: str


@dataclass(frozen=True)
class Verdict:
    """The outcome of one case: `error` is the largest difference over the largest expected value."""

    case: Case
    error: float
    seconds: float
    problem: str = ""

    @property
    def agrees(self) -> bool:
        """Within tolerance, and no fault was found."""
        return not self.problem and self.error <= self.case.tolerance


TOLERANCE = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}


def judge(case: Case, checked: bool = True) -> Verdict:
    """Run one case on the simulator, watched unless `checked` is False."""
    start = time.perf_counter()
    allowed = frozenset({Fault.RACE} if case.unordered else ())
    try:
        with settings.options(checked=checked, lockstep=bool(case.unordered), allow=allowed):
            simulated, expected = case.run()
    except CortexError as problem:
        return Verdict(case, float("inf"), time.perf_counter() - start, str(problem))
    difference = np.abs(simulated.astype(np.float64) - expected.astype(np.float64)).max(initial=0.0)
    error = difference / max(np.abs(expected.astype(np.float64)).max(initial=0.0), 1e-30)
    return Verdict(case, float(error), time.perf_counter() - start)
