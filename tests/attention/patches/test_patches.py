"""What a replaced method computes is judged by mlx-lm's tokens in tests/engine/test_parity.py; here is that the
original still runs for everybody else.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.attention import patches
from support.models.tiny import tokens_of


@pytest.mark.parametrize(
    "name", ["gemma2", "plamo", "gpt_bigcode", "dynamic rope", "llama4", "afm7", "plamo2", "baichuan_m1"]
)
def test_with_mlx_lms_own_caches_a_model_computes_what_it_did(name: str, judged: Any) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    model = judged(name)[0]
    owners = {type(m) for m in model.modules() if hasattr(type(m).__call__, "replaced")}
    for owner in owners:  # by an earlier test of this process
        owner.__call__ = owner.__call__.replaced
    tokens = mx.array([tokens_of(20, seed=2)])

    def logits() -> list[np.ndarray]:
        cache = make_prompt_cache(model)
        return [np.array(model(tokens[:, :12], cache=cache)), np.array(model(tokens[:, 12:], cache=cache))]

    before = logits()
    patches.install(model)
    patches.install(model)
    replaced = [type(m).__call__ for m in model.modules() if hasattr(type(m).__call__, "replaced")]
    assert replaced and not any(hasattr(method.replaced, "replaced") for method in replaced), "once"
    for ours, theirs in zip(logits(), before, strict=True):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(np.array(model(tokens)), np.array(model(tokens, cache=make_prompt_cache(model))))
