"""What the next step computes, and for whom: decisions about requests and blocks. Nothing here imports mlx."""
