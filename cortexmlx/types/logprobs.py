"""Log-probabilities as callers get them: of one token, and of a prompt. Without mlx or threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cortexmlx.types.arrays import IntArray


@dataclass(frozen=True)
class TokenLogprob:
    """The natural-log probability of one token, and those of the likeliest tokens at its place, the best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprobs(Sequence[TokenLogprob | None]):
    """The log-probability of each token of a prompt, given the tokens before it. The first item is None.

    It is a sequence that makes its items when they are read. `tokens` are the `n` tokens. `logprobs` `[n] float32` are
    their own log-probabilities, NaN for the first; do not write to this array.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        logprobs: npt.NDArray[np.float32],
        top_ids: IntArray,
        top_logprobs: npt.NDArray[np.float32],
    ) -> None:
        """`top_ids` and `top_logprobs` `[n, k]` are those of the likeliest tokens at each place."""
        self.tokens = tokens
        self.logprobs = logprobs
        self._top_ids = top_ids
        self._top_logprobs = top_logprobs

    def __len__(self) -> int:
        return len(self.logprobs)

    @overload
    def __getitem__(self, index: int) -> TokenLogprob | None: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[TokenLogprob | None, ...]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(map(self._item, range(len(self))[index]))
        return self._item(range(len(self))[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PromptLogprobs) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"PromptLogprobs({list(self)!r})"

    def _item(self, index: int) -> TokenLogprob | None:
        """Return the log-probability at a place; None for the first token."""
        if not index:
            return None
        top = zip(self._top_ids[index].tolist(), self._top_logprobs[index].tolist(), strict=True)
        return TokenLogprob(self.tokens[index], float(self.logprobs[index]), tuple(top))
