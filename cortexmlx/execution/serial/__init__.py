"""Models that cannot be paged: one sequence at a time, on mlx-lm's own caches."""
