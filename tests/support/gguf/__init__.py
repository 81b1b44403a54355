"""GGUF files that tests write for themselves, and what is in them in float64."""
