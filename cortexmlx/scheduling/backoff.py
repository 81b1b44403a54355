"""After memory was refused: smaller steps for a while, and growth that is asked for again. Without mlx."""

from __future__ import annotations

from cortexmlx.scheduling.latency import LEAST_PIECE

STEPS_TO_RELAX = 64
"""After this many good steps in a row, twice as much is tried."""

MOST_STEPS = 64 * STEPS_TO_RELAX
"""After this many steps at most, growth that was refused is asked for again."""


class Backoff:
    """The bounds of a step: at most `rows` rows and `tokens` prompt tokens. Before any refusal these are `most_rows`
    and `most_tokens`.

    Memory may be free again later, when another app has ended. So after `STEPS_TO_RELAX` good steps both are doubled,
    until nothing is held back.
    """

    def __init__(self, most_rows: int, most_tokens: int) -> None:
        self.most_rows = self.rows = most_rows
        self.most_tokens = self.tokens = most_tokens
        self.holds_back = False
        """Whether a step could have more rows, or more tokens."""
        self._good = 0

    def tighten(self, rows: int) -> None:
        """Allow at most `rows` rows, at least one, and half of the tokens, because memory was refused."""
        self.rows = max(1, min(self.rows, rows))
        self.tokens = max(min(LEAST_PIECE, self.most_tokens), self.tokens // 2)
        self._good = 0
        self._compare()

    def relax(self) -> bool:
        """Note a good step. Return whether the next steps may have more."""
        if not self.holds_back:
            return False
        self._good += 1
        if self._good < STEPS_TO_RELAX:
            return False
        self._good = 0
        self.rows = min(self.most_rows, 2 * self.rows)
        self.tokens = min(self.most_tokens, 2 * self.tokens)
        self._compare()
        return True

    def _compare(self) -> None:
        self.holds_back = (self.rows, self.tokens) != (self.most_rows, self.most_tokens)


class GrowthRetry:
    """When a cache that was refused memory asks for it again while requests run: after `STEPS_TO_RELAX` good steps, and
    after each further refusal in a row twice as many, up to `MOST_STEPS`. A refusal may cost all rows a new beginning.
    """

    def __init__(self) -> None:
        self.wait = self._good = 0
        """The good steps to wait for; 0: nothing was refused lately, and nobody need ask."""

    def refuse(self) -> None:
        """Note a refusal."""
        self.wait, self._good = min(max(STEPS_TO_RELAX, 2 * self.wait), MOST_STEPS), 0

    def is_due(self) -> bool:
        """Note a good step. Return whether growth may be asked for again from now on."""
        if not self.wait:
            return False
        self._good += 1
        due = self._good == self.wait
        if self._good >= 2 * self.wait:  # nothing was refused since
            self.wait = 0
        return due
