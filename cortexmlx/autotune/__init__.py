"""Autotuning: times the candidates that can do a job, uses the fastest, and keeps the times on disk. Never imports
mlx.
"""
