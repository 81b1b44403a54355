"""JSON schemas with documents: some that can be enforced, and some that are refused."""
