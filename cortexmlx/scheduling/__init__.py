"""The scheduler: which requests and tokens the next step computes. Nothing here imports mlx."""
