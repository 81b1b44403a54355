"""The plan of a step: plain data, its builder, and the placement of tokens in blocks. No mlx."""
