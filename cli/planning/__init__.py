"""What a model takes, and what a machine has: the arithmetic behind `plan`, and the memory of a server's models."""
