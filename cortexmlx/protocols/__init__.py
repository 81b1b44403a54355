"""Other people's formats: each is read into what the engine is asked, and written from what it answers. No mlx."""
