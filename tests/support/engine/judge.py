"""The judge of greedy decoding: mlx-lm on the same weights, and a proof wherever the two disagree.

Two correct programs may choose differently where the best logits tie to within the noise of float arithmetic. A
disagreement counts as a proven tie only if, recomputed by mlx-lm in one pass over the same tokens, the two
candidates' logits differ by less than `NOISE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NOISE = 2e-3
"""Largest difference of two logits (of order 10) that float32 rounding explains: see `logit_noise` in the parity
tests.
"""


def greedy(model: Any, tokenizer: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """mlx-lm's greedy tokens for `prompt`, the end token included."""
    import mlx.core as mx
    from mlx_lm import stream_generate

    return [r.token for r in stream_generate(model, tokenizer, mx.array(list(prompt)), max_tokens=max_tokens)]


def tie_gap(model: Any, prompt: Sequence[int], before: Sequence[int], mine: int, theirs: int) -> float:
    """How far apart mlx-lm's logits of the two candidates are after `prompt` and the tokens `before`."""
    import mlx.core as mx

    logits = model(mx.array([[*prompt, *before]]))[0, -1].astype(mx.float32)
    best = float(logits.max().item())
    return max(best - float(logits[mine].item()), best - float(logits[theirs].item()))


def disagreement(
    model: Any, prompt: Sequence[int], mine: Sequence[int], theirs: Sequence[int]
) -> tuple[int, float] | None:
    """The first place where the tokens differ and the gap of the two logits there; None if they are the same.

    An answer that merely ends earlier differs by an infinite gap.
    """
    for place, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a != b:
            return place, tie_gap(model, prompt, theirs[:place], a, b)
    return None if len(mine) == len(theirs) else (min(len(mine), len(theirs)), float("inf"))


def assert_same(
    model: Any, prompt: Sequence[int], mine: Sequence[int], theirs: Sequence[int], noise: float = NOISE
) -> None:
    """The same tokens, or two that tie where they part."""
    gap = disagreement(model, prompt, mine, theirs)
    assert gap is None or gap[1] < noise, f"prompt of {len(prompt)}: differs at {gap[0]} by {gap[1]}"
