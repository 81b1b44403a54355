"""MLX's own kernels, out of the headers of the installed MLX: one module a family, each judged in float64 NumPy."""
