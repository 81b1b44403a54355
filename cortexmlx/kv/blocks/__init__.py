"""Blocks as numbers: which are free, whose they are, and where a sequence has them. No mlx."""
