"""Times the candidates for a job, lets the fastest serve, and keeps the times on disk. It never imports mlx."""
