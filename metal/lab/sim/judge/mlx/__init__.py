"""MLX's own kernels from the headers of the installed MLX: one module per family, each judged in float64 NumPy."""
