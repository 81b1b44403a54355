"""Comparisons of our kernels with MLX's own. Both run in the simulator."""
