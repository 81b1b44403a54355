"""Llama 4's chunks and scaled queries, far beyond one chunk, against mlx-lm's dense mask over all tokens at once."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.attention.probe import probe
from cortexmlx.kv.spec import AttentionWindow, group_layers
from cortexmlx.models import load_model
from support.engine.core_driver import Driver
from support.engine.logits import answers_with_logits, mlx_lms_logits
from support.models.tiny import CONFIGS, tokens_of

CHUNK = CONFIGS["llama4"]["text_config"]["attention_chunk_size"]


def test_three_of_four_layers_see_their_chunk(tiny: Any) -> None:
    groups = group_layers(probe(load_model(tiny("llama4")).model))
    assert [(g.spec.attention_window, g.layers) for g in groups] == [
        (AttentionWindow(CHUNK, chunked=True), (0, 1, 2)),
        (AttentionWindow(), (3,)),
    ]


@pytest.mark.parametrize("block_size", [8, 32])
def test_logits_are_those_of_all_tokens_at_once(block_size: int, tiny: Any, judged: Any) -> None:
    """Prompts that end before, at and behind a chunk's last token, in pieces that go on into the next chunk; answers
    that do so within a decode window. Blocks of 32 hold two chunks.
    """
    prompts = [tokens_of(n, seed=n) for n in (5, 15, 16, 17, 50)]
    driver = Driver(tiny("llama4"), tokens=1024, max_rows=5, prefill_budget=12, block_size=block_size)
    model = judged("llama4")[0]
    for prompt, (answer, mine) in zip(prompts, answers_with_logits(driver, prompts, 24), strict=True):
        theirs = np.array(model(mx.array([[*prompt, *answer]]))[0, len(prompt) - 1 : -1])
        assert len(set(answer)) > 6 and np.abs(mine - theirs).max() < 1e-4, len(prompt)


def test_mlx_lms_own_cache_agrees_with_its_dense_mask_in_pieces_and_token_by_token(judged: Any) -> None:
    """Before each piece it keeps the newest tokens, as many as a chunk has: what the piece may see is among them. So
    either judges.
    """
    from mlx_lm.models.cache import make_prompt_cache

    model, tokens, cache = judged("llama4")[0], tokens_of(70, seed=1), None
    dense = np.array(model(mx.array([tokens]))[0])
    cache, begin = make_prompt_cache(model), 0
    for count in (7, 20, 1, 32):
        piece = np.array(model(mx.array([tokens[begin : begin + count]]), cache=cache)[0])
        assert np.abs(piece - dense[begin : begin + count]).max() < 1e-4
        begin += count
    steps = mlx_lms_logits(model, tokens[:40], tokens[40:])
    assert np.abs(steps - dense[39:-1]).max() < 1e-4
