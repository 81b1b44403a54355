"""The disk tier of a model in workers: each rank keeps its part of each block. It never imports mlx."""
