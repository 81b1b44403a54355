"""mlx-lm's model code: entered without its side effects, and functions replaced in its loaded modules."""
