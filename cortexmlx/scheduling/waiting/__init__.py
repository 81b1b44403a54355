"""Who waits, who may begin, and who computes what others wait for. No mlx."""
