"""What a model needs, without loading it."""
