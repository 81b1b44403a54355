"""Autotuning: times the kernels that can do a job, uses the fastest, and keeps the times on disk. Never imports mlx."""
