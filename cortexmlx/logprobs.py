"""Log-probabilities as callers get them: of one token, and of a prompt. No mlx, no threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cortexmlx.arrays import IntArray


@dataclass(frozen=True)
class TokenLogprob:
    """The natural-log probability of one token, and of the likeliest ones at its place, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprobs(Sequence[TokenLogprob | None]):
    """What the model thinks of each token of a prompt, given those before it: None of the first.

    A sequence that makes its items when they are asked for. `tokens` are the `n` tokens, `logprobs` `[n] float32` their
    own, NaN for the first; the array is not to be written.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        logprobs: npt.NDArray[np.float32],
        top_ids: IntArray,
        top_logprobs: npt.NDArray[np.float32],
    ) -> None:
        """`top_ids` and `top_logprobs` `[n, k]` are of the likeliest in each place."""
        self.tokens = tokens
        self.logprobs = logprobs
        self._top_ids = top_ids
        self._top_logprobs = top_logprobs

    def __len__(self) -> int:
        return len(self.logprobs)

    @overload
    def __getitem__(self, place: int) -> TokenLogprob | None: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[TokenLogprob | None, ...]: ...

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return tuple(map(self._at, range(len(self))[place]))
        return self._at(range(len(self))[place])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PromptLogprobs) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"PromptLogprobs({list(self)!r})"

    def _at(self, place: int) -> TokenLogprob | None:
        if not place:
            return None
        top = zip(self._top_ids[place].tolist(), self._top_logprobs[place].tolist(), strict=True)
        return TokenLogprob(self.tokens[place], float(self.logprobs[place]), tuple(top))
