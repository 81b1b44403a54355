"""`probe_attention_calls`: what the probe sees of a model's layers is what its steps do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.attention.paged import AttentionCall, AttentionParams
from cortexmlx.attention.probe import probe_attention_calls
from support.engine.core_driver import Driver
from support.models.tiny import CONFIGS, tokens_of

SERIAL = {"dynamic rope"}


FAMILIES = ("llama", "windowed llama", "gemma2", "gpt_oss", "deepseek_v3", "llama4", "afm7", "qwen3_next")
OTHERS = sorted(set(CONFIGS) - SERIAL - {*FAMILIES})


@pytest.mark.parametrize(
    "name", [*FAMILIES, *(pytest.param(n, marks=pytest.mark.slow) for n in sorted(set(CONFIGS) - SERIAL - {*FAMILIES}))]
)
def test_the_probe_sees_the_calls_of_every_step(name: str, tiny: Callable[[str], Path]) -> None:
    """Of steps with single tokens, with pieces, and with both; but pieces of latents may be given keys of their own."""
    driver = Driver(tiny(name), attention="reference")
    runner: Any = driver.core.runner
    seen: set[tuple[int, AttentionCall]] = set()
    attend = runner._attend

    def noting(queries: mx.array, kv: Any, params: AttentionParams) -> mx.array:
        if kv.expand is None:
            seen.add((kv.layer, AttentionCall.from_arguments(queries, params)))
        found: mx.array = attend(queries, kv, params)
        return found

    calls = probe_attention_calls(driver.core.loaded.model)
    runner._attend = noting
    first = driver.add(tokens_of(9), 4)
    driver.step(2)
    second = driver.add(tokens_of(11), 4)
    driver.finish()
    assert driver.result(first).token_ids and driver.result(second).token_ids
    assert seen == set(calls) and len(calls) == len(seen) > 0
