"""Model types that are not paged, or were not when this was written: texts one after the other on mlx-lm's own caches.

All of mlx-lm's kinds of caches are among them: a class of a model's own, several caches in a layer, layers that keep
nothing, states, windows. What of the last text is used again must be as if it had been computed.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from support.engine.core_driver import Driver
from support.models.tiny import tokens_of
from tests.architectures.parity import subject

TYPES = (
    "nemotron-nas",
    "deepseek_v41",
    "deepseek_v32",
    "glm_moe_dsa",
    "minimax_m3_vl",
    "falcon_h1",
    "baichuan_m1",
    "recurrent_gemma",
    "longcat_flash",
    "llama4",
    "gemma3n",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_texts_that_share_their_beginnings_get_mlx_lms_tokens(name: str, tmp_path: Path, unpaged: None) -> None:
    made = subject(name, tmp_path / name)
    driver = Driver(made.folder, prefill_budget=32)

    def check(text: list[int]) -> list[int]:
        answer = driver.result_of(text, 20)
        wanted = [int(token) for token, _ in generate_step(mx.array(text), made.judge, max_tokens=20)]
        assert list(answer.token_ids) == wanted, f"{len(text)} tokens, {answer.usage.cached_tokens} of them cached"
        return [*text, *wanted]

    prompt = tokens_of(60, seed=2)
    for length in (1, 9, 31, 60):
        check(prompt[:length])
    for shared in (30, 0):
        gone_on = check([*prompt[:shared], *tokens_of(20, seed=9)])
        check([*gone_on, 1, 2, 3])
        assert driver.core.stats().cached_tokens >= len(gone_on) - 1, "a text that goes on is not computed anew"
