"""The cost of structured output, and the time that forced tokens save."""
