"""Quantized matmuls of a few tokens, computed by our kernel instead of MLX's."""
