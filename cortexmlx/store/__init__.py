"""The disk tier: blocks of the KV cache in files, for after they have left memory, and for the next process. No mlx."""
