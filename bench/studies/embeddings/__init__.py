"""How many texts per second are embedded, beside mlx-lm's model called with padded batches."""
