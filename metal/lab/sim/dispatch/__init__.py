"""One launch of a translated kernel: its buffers, its memory and its findings."""
