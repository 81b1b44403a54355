"""Log-probabilities of known tokens: NumPy's in float64, from one slice of logits at a time."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.execution.prompt_scores import rows_at_once, score_tokens


@pytest.mark.parametrize("top", [0, 3, 40])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_they_are_those_of_the_whole(top: int, dtype: mx.Dtype) -> None:
    logits = (6 * mx.random.normal((23, 40), key=mx.random.key(top))).astype(dtype)
    tokens = np.arange(23, dtype=np.int32) * 7 % 40
    exact = np.array(logits.astype(mx.float32), np.float64)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    asked = []

    def compute(part: slice) -> mx.array:
        asked.append(part)
        return logits[part]

    found = score_tokens(compute, tokens, top, 5)
    assert asked == [slice(first, first + 5) for first in (0, 5, 10, 15, 20)]
    np.testing.assert_allclose(found.logprobs, exact[np.arange(23), tokens], atol=1e-5)
    assert found.top_ids.shape == found.top_logprobs.shape == (23, top)
    np.testing.assert_allclose(found.top_logprobs, -np.sort(-exact)[:, :top], atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(exact, found.top_ids.astype(int), 1), found.top_logprobs, atol=1e-5)
    part = found[4:9]
    assert part.logprobs.tolist() == found.logprobs[4:9].tolist() and part.top_ids.shape == (5, top)


def test_one_slice_is_there_at_a_time() -> None:
    """What a slice takes is given back before the next, however many there are."""
    rows, vocab = 16, 1 << 16
    before = mx.get_active_memory()
    peaks = []
    for slices in (2, 12):
        mx.reset_peak_memory()
        tokens = np.zeros(slices * rows, np.int32)
        score_tokens(lambda _: mx.random.normal((rows, vocab)), tokens, 1, rows)
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] < 1.2 * peaks[0]
    assert mx.get_active_memory() - before < rows * vocab


@pytest.mark.parametrize(("vocab", "rows"), [(320, 256), (49_152, 170), (131_072, 64), (262_144, 32), (1 << 30, 16)])
def test_a_slice_has_so_many_logits_but_not_too_few_rows(vocab: int, rows: int) -> None:
    assert rows_at_once(vocab) == rows
