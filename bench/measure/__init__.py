"""What all parts of the benchmark share: clocks, prompts, both contestants, the machine."""
