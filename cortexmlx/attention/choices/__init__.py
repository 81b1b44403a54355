"""Which of several ways computes the attention of single tokens: the ways, what they are timed on, and the choice."""
