"""What all parts of the benchmark share: clocks, prompts, both contestants (cortexmlx and mlx-lm), the machine."""
