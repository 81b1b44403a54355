"""Our kernels beside MLX's own, both in the simulator."""
