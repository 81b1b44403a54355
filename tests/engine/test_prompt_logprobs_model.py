"""What the starter model thinks of each token of a text, and its perplexity: mlx-lm's logits, within 1e-4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from cortexmlx import Engine, SamplingParams

pytestmark = pytest.mark.model

TEXT = Path(__file__).resolve().parents[2] / "docs" / "python.md"
TOKENS, PIECE = 1200, 200


def judge(model: Any, tokens: list[int]) -> np.ndarray:
    """mlx-lm's log-probabilities of all tokens but the first, in float64 from its float32 logits."""
    cache, known = make_prompt_cache(model), []
    for first in range(0, len(tokens) - 1, PIECE):
        piece = tokens[first : first + PIECE]
        logits = np.array(model(mx.array([piece]), cache=cache)[0].astype(mx.float32), np.float64)
        nexts = tokens[first + 1 : first + 1 + PIECE]
        logits = logits[: len(nexts)] - logits[: len(nexts)].max(axis=-1, keepdims=True)
        own = logits[np.arange(len(nexts)), nexts]
        known.append(own - np.log(np.exp(logits).sum(axis=-1)))
    return np.concatenate(known)


@pytest.mark.parametrize("count", [300, pytest.param(TOKENS, marks=pytest.mark.slow)])
def test_they_are_mlx_lms(count: int) -> None:
    from cortexmlx.models import load_model

    with Engine("smollm2", kv_memory="256MB", prefill_budget=128) as engine:
        tokens = engine.encode(TEXT.read_text())[:count]
        asked = SamplingParams(max_tokens=0, prompt_logprobs=2)
        prompts = [tokens, tokens[count // 4 : count // 4 + 50], tokens[70:71], tokens[count * 3 // 4 :]]
        answers = [c.prompt_logprobs for c in engine.generate_batch(prompts, asked)]
    model = load_model("smollm2").model
    for prompt, told in zip(prompts, answers, strict=True):
        assert told is not None and len(told) == len(prompt)
        if len(prompt) > 1:
            error = np.abs(told.logprobs[1:] - judge(model, prompt)).max()
            print(f"{len(prompt)} tokens: {error:.2g}")
            assert error < 1e-4


@pytest.mark.slow
def test_the_perplexity_is_mlx_lms_on_the_same_windows() -> None:
    """512 tokens behind each other in windows of 512 with 256 new ones each, and a last one with fewer."""
    from cortexmlx.models import load_model

    with Engine("smollm2", kv_memory="256MB", prefix_cache=False) as engine:
        tokens = engine.encode(TEXT.read_text())[:TOKENS]
        known = engine.perplexity(tokens, context=512, stride=256)
    model = load_model("smollm2").model
    total = -judge(model, tokens[:512]).sum()
    for end, scored in ((768, 256), (1024, 256), (1200, 176)):
        total -= judge(model, tokens[end - 512 : end])[-scored:].sum()
    assert known.tokens == 1199 and known.windows == known.all_windows == 4
    print(f"perplexity {known.perplexity:.6f}, mlx-lm {np.exp(total / 1199):.6f}")
    assert abs(known.nll - total) / known.tokens < 1e-5


@pytest.mark.slow
def test_eight_bits_cost_less_than_half_a_percent_of_perplexity() -> None:
    """On 4,000 tokens, in windows as long as 2,048."""
    found = {}
    for bits in (None, 8):
        with Engine("smollm2", kv_memory="300MB", prefix_cache=False, max_rows=4, kv_bits=bits) as engine:
            tokens = engine.encode(TEXT.read_text())[:4000]
            found[bits] = engine.perplexity(tokens, context=2048, stride=1024)
    print({bits: known.perplexity for bits, known in found.items()})
    assert found[8].tokens == found[None].tokens == len(tokens) - 1 == 3999
    assert abs(found[8].perplexity / found[None].perplexity - 1) < 0.005
