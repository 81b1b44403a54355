"""Plain data that callers pass and get. Without mlx or threads."""
