"""BatchClass: the classes of rows and lengths that have a choice of their own. Without mlx."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cortexmlx.kv.step import GroupStep

ROWS = (1, 4, 16)
"""The most rows of each class. More rows are a class, too."""

TOKENS = (512, 4096)
"""The most tokens that a row of each class sees. More tokens are a class, too."""

_LONG = 8192
"""Tokens on which the class of the longest rows is timed."""


class BatchClass(NamedTuple):
    """A class of decode steps, by the number of rows and the longest of them."""

    rows: int | None
    """The most rows; None: any number."""
    tokens: int | None
    """The most tokens that a row sees; None: any number."""
    run: bool = False
    """Whether it is one row whose blocks are one run."""

    @classmethod
    def of(cls, step: GroupStep) -> BatchClass:
        """Return the class of a step's single-token queries. It depends on what a decode window begins with, so it is
        the same for all steps of the window.
        """
        seen = step.lengths - step.attention_window.oldest(np.maximum(step.lengths - 1, 0))
        run = step.rows == 1 and step.runs[0] is not None
        return cls(_least(step.rows, ROWS), _least(int(seen.max()), TOKENS), run)

    @property
    def most(self) -> int | None:
        """The most tokens that all rows see together, if each is as long as the longest; None: any number."""
        return None if self.rows is None or self.tokens is None else self.rows * self.tokens

    @property
    def label(self) -> str:
        """The class in a line of a table."""
        rows = _words(self.rows, ROWS, "row")
        if self.rows == 1:
            rows += " in one run" if self.run else " in pieces"
        return f"{rows}, {_words(self.tokens, TOKENS, 'token')}"

    def sample(self, max_rows: int, longest: int) -> tuple[int, int]:
        """Return the rows, and the tokens of each, on which the class is timed."""
        rows = max_rows if self.rows is None else min(self.rows, max_rows)
        return rows, min(_LONG if self.tokens is None else self.tokens // 2, longest)


def classes(max_rows: int, longest: int) -> list[BatchClass]:
    """Return the classes of the steps of up to `max_rows` rows that see up to `longest` tokens, the usual ones first:
    few rows, and short ones.
    """
    rows = [most for most, least in zip((*ROWS, None), (0, *ROWS), strict=True) if max_rows > least]
    tokens = [most for most, least in zip((*TOKENS, None), (0, *TOKENS), strict=True) if longest > least]
    pairs = [BatchClass(r, t, r == 1) for r in rows for t in tokens]
    return pairs + [BatchClass(1, t) for t in tokens]


def _least(number: int, most: tuple[int, ...]) -> int | None:
    return next((bound for bound in most if number <= bound), None)


def _words(bound: int | None, bounds: tuple[int, ...], noun: str) -> str:
    if bound is None:
        return f"more than {bounds[-1]:,} {noun}s"
    before = next((b for b in reversed(bounds) if b < bound), 0)
    if before == 0:
        return f"1 {noun}" if bound == 1 else f"up to {bound:,} {noun}s"
    return f"{before + 1:,} to {bound:,} {noun}s"
