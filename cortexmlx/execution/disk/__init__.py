"""The disk tier of a runner in this process: pieces of its memory, and records on disk. It never imports mlx."""
