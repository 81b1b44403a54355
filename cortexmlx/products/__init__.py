"""Products of a few tokens with a model's quantized weights, by a kernel of our own in the place of MLX's."""
