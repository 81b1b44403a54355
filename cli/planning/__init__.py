"""What memory a model takes, and what a machine has: the arithmetic of `plan` and of a server's models."""
