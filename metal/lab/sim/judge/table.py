"""Every judged kernel, by family."""

from collections.abc import Callable, Iterator

from cortexmlx.metal.lab.sim.judge import mlx_lm_kernels, mlx_vlm_kernels, sdpa, steel
from cortexmlx.metal.lab.sim.judge.cases import Case, Skipped
from cortexmlx.metal.lab.sim.judge.mlx import attention, elementwise, gemv, others, quantized, reduce, rows, scan, sort

Cases = Callable[[], Iterator[Case | Skipped] | Iterator[Case] | Iterator[Skipped]]

FAMILIES: dict[str, Cases] = {
    "sdpa": sdpa.cases,
    "attention": attention.cases,
    "steel": steel.cases,
    "softmax": rows.softmax_cases,
    "rows": rows.cases,
    "reduce": reduce.cases,
    "scan": scan.cases,
    "sort": sort.cases,
    "gemv": gemv.cases,
    "quantized": quantized.cases,
    "elementwise": elementwise.cases,
    "mlx-lm": mlx_lm_kernels.cases,
    "mlx-vlm": mlx_vlm_kernels.cases,
    "others": others.cases,
}


def all_cases(families: tuple[str, ...] = tuple(FAMILIES)) -> list[Case | Skipped]:
    """Return every judged kernel of some families, in the order of the table."""
    return [case for family in families for case in FAMILIES[family]()]
