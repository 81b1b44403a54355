"""Waiting requests: their queues, fair shares, admission, and waits for prefixes and disk loads. No mlx."""
