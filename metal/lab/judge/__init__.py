"""Test the simulator with kernels that are known to be right on Apple hardware: MLX's own and mlx-lm's. The tests run
them.
"""

from cortexmlx.metal.lab.judge import attention, mlx_lm_kernels, quantized
from cortexmlx.metal.lab.judge.cases import KernelCase, judge

__all__ = ["KernelCase", "all_cases", "judge"]


def all_cases() -> list[KernelCase]:
    """Return the cases of all judged kernels."""
    parts = attention.sdpa_cases, attention.grouped_cases, attention.steel_cases, quantized.cases, mlx_lm_kernels.cases
    return [case for cases in parts for case in cases()]
