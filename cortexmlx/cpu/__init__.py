"""Faster replacements for what MLX's CPU build does slowly. Nothing here is used on a GPU."""
