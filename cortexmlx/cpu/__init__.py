"""What MLX's CPU build is slow at, done in another way. Nothing here is used on a GPU."""
