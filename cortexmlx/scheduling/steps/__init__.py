"""A plan put into arrays: the plan as data, who is where in it, and its builder. No mlx."""
