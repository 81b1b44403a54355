"""The random model is a model folder like any other: mlx-lm loads it, and its tokenizer gives every text back."""

from __future__ import annotations

import json
from pathlib import Path

import mlx_lm
from mlx_lm.utils import get_total_parameters

from cortexmlx.bench.measure.random_model import CONFIG, NAME, write_random_model


def test_mlx_lm_loads_what_was_written(model: str) -> None:
    loaded, tokenizer = mlx_lm.load(model)
    # embedding; queries, output, keys and values; gate, up, down; norms
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    assert get_total_parameters(loaded) == 512 * 64 + 2 * layer + 64
    text = "né, 世界 🙂\n\t"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.eos_token == "<end>"


def test_the_weights_are_the_same_every_time_and_settings_are_replaced(tmp_path: Path) -> None:
    small = {"num_hidden_layers": 1, "vocab_size": 300}
    first, second = (write_random_model(tmp_path / name, small) for name in "ab")
    assert first == tmp_path / "a" / NAME
    assert json.loads((first / "config.json").read_text()) == CONFIG | small
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
