"""Access to mlx-lm's model code: imports it without side effects, and replaces functions in its modules."""
