"""The matmul of a few rows with quantized weights: which weights it serves, and its kernel."""
