"""A judged kernel: a name, a run that returns its result and the expected result, and a tolerance."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.errors import CortexError
from cortexmlx.metal.lab.sim import settings
from cortexmlx.metal.lab.sim.report import Fault

ResultAndExpected = tuple[npt.NDArray[np.floating], npt.NDArray[np.floating]]


@dataclass(frozen=True)
class Defect:
    """A kernel's known fault, which hardware tolerates although the language does not define it.

    The simulator stops at it, so there is no result to compare: the case agrees if it reports this fault and no other.
    """

    fault: Fault
    reason: str


@dataclass(frozen=True)
class KernelCase:
    """One known-good kernel in one shape. `run` runs the kernel on the simulator."""

    group: str
    name: str
    run: Callable[[], ResultAndExpected]
    tolerance: float
    """Largest error, relative to the largest expected value."""
    defect: Defect | None = None
    """A fault that the kernel is known to have."""


@dataclass(frozen=True)
class KernelVerdict:
    """The outcome of one case."""

    case: KernelCase
    error: float
    """Largest difference over the largest expected value."""
    problem: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the error is within the tolerance and no unexpected fault was found."""
        return not self.problem and self.error <= self.case.tolerance


TOLERANCE = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}


def judge(case: KernelCase) -> KernelVerdict:
    """Run one case on the simulator, with every access watched."""
    defect = case.defect
    try:
        with settings.recording(coalescing=False) as launches:
            simulated, expected = case.run()
    except CortexError as problem:
        found = {finding.fault for report in launches.launches for finding in report.findings}
        known = defect is not None and found == {defect.fault}
        error = 0.0 if known else float("inf")
        return KernelVerdict(case, error, "" if known else str(problem))
    difference = np.abs(simulated.astype(np.float64) - expected.astype(np.float64)).max(initial=0.0)
    error = difference / max(np.abs(expected.astype(np.float64)).max(initial=0.0), 1e-30)
    return KernelVerdict(case, float(error))
