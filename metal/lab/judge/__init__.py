"""Test the simulator with kernels that are known to be right on Apple hardware: MLX's own and mlx-lm's. The tests run
them.
"""

from cortexmlx.metal.lab.judge.cases import KernelCase, KernelVerdict, Skipped, judge
from cortexmlx.metal.lab.judge.table import all_cases

__all__ = ["KernelCase", "KernelVerdict", "Skipped", "all_cases", "judge"]
