"""Speculative decoding: who drafts next tokens, and when drafting pays. It never imports mlx."""
