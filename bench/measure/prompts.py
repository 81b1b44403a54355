"""Prompts for benchmarks: random token ids, so that no two begin alike and no prefix is cached by chance.

The time of a forward pass does not depend on which tokens it computes.
"""

from __future__ import annotations

import numpy as np


class PromptStream:
    """A stream of unique random prompts; the same `seed` gives the same stream."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._first = min(256, vocab_size // 2)  # the lowest ids are often control tokens
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def next_prompt(self, tokens: int) -> tuple[int, ...]:
        """Return the next prompt, of `tokens` tokens."""
        return tuple(self._random.integers(self._first, self._vocab_size, tokens).tolist())

    def draw_lengths(self, count: int, min_length: int, max_length: int) -> list[int]:
        """Draw `count` log-uniform lengths (as many of 64 to 128 as of 512 to 1,024 tokens). One is `max_length`."""
        lengths = np.exp(self._random.uniform(np.log(min_length), np.log(max_length + 1), count)).astype(int)
        lengths[0] = max_length
        return [int(n) for n in self._random.permutation(lengths.clip(min_length, max_length))]
