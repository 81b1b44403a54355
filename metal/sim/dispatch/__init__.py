"""One launch of a translated kernel: its buffers and memory, and what was found in it."""
