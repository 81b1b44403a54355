"""Test the simulator with kernels that are known to be right on Apple hardware: MLX's own and mlx-lm's.

`python -m cortexmlx.metal.lab.sim.judge` runs them and prints the table.
"""

from cortexmlx.metal.lab.sim.judge.cases import Case, Skipped, Verdict, judge
from cortexmlx.metal.lab.sim.judge.table import all_cases

__all__ = ["Case", "Skipped", "Verdict", "all_cases", "judge"]
