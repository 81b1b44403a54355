"""Starting workers by MLX's own launcher, and ending them without leftovers."""
