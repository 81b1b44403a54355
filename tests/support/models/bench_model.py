"""The small random model that benchmarks are tested on, and `cortexmlx bench` called on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortexmlx.bench.measure.random_model import write_random_model
from cortexmlx.cli.start import run

SMALL: dict[str, object] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
}


def write_small(folder: Path) -> str:
    """Its path."""
    return str(write_random_model(folder, SMALL))


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `cortexmlx bench` prints."""
    assert run(["bench", *arguments]) == 0
    return capsys.readouterr().out
