"""What every part of the benchmark measures with: clocks, prompts, both contestants, the machine."""
