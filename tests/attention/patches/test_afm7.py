"""Layers that attend to another layer's keys and values, against mlx-lm's own caches; and what they take: nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cortexmlx.attention.probe import probe
from cortexmlx.kv.spec import AttentionWindow
from cortexmlx.models import load_model
from support.engine.core_driver import Driver
from support.engine.logits import answers_with_logits, mlx_lms_logits
from support.models.tiny import CONFIGS, tokens_of


@pytest.mark.parametrize(
    ("name", "attention_windows"),
    [("afm7", [AttentionWindow(), AttentionWindow()]), ("gemma3n", [AttentionWindow(9), AttentionWindow()])],
)
def test_only_layers_with_keys_of_their_own_take_memory(
    name: str, attention_windows: list[AttentionWindow], tiny: Any
) -> None:
    specs = probe(load_model(tiny(name)).model)
    config = CONFIGS[name].get("text_config", CONFIGS[name])
    assert (
        config.get("num_layers", config.get("num_hidden_layers")) == 4
        and [s.attention_window for s in specs] == attention_windows
    )


@pytest.mark.parametrize("name", ["afm7", "gemma3n"])
def test_logits_are_those_of_mlx_lms_own_caches(name: str, tiny: Any, judged: Any) -> None:
    prompts = [tokens_of(n, seed=n) for n in (1, 8, 28)]
    driver = Driver(tiny(name), max_rows=3, prefill_budget=12)
    for prompt, (answer, mine) in zip(prompts, answers_with_logits(driver, prompts, 20), strict=True):
        theirs = mlx_lms_logits(judged(name)[0], prompt, answer)
        assert len(set(answer)) > 6 and np.abs(mine - theirs).max() < 1e-4, len(prompt)
