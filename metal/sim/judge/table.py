"""Every judged kernel."""

from . import mlx_kernels, mlx_lm_kernels, sdpa, steel
from .cases import Case, Skipped


def all_cases() -> list[Case | Skipped]:
    """Every judged kernel, in the order of the table."""
    return [*sdpa.cases(), *steel.cases(), *mlx_kernels.cases(), *mlx_lm_kernels.cases()]
