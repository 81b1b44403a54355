"""Adapters for studies: the same numbers in both formats, for the layers that are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx import Engine
from cortexmlx.bench.studies.adapters.random_adapters import (
    ATTENTION,
    SEVEN,
    layer_sizes,
    write_adapter,
    write_mlx_lm_adapter,
)
from cortexmlx.models.adapters.low_rank import read_low_rank


@pytest.fixture
def engine(tiny: Any) -> Iterator[Engine]:
    with Engine(tiny("llama"), kv_memory="256KB") as opened:
        yield opened


def test_both_formats_have_the_same_numbers(engine: Engine, tmp_path: Path) -> None:
    sizes = layer_sizes(engine, SEVEN)
    assert len(sizes) == 14 and sizes["model.layers.1.mlp.down_proj"] == (48, 32)
    assert len(layer_sizes(engine, ATTENTION)) == 4
    one = read_low_rank("a", write_adapter(tmp_path / "peft", sizes, 4, seed=1), 8, 1 << 20)
    other = read_low_rank("b", write_mlx_lm_adapter(tmp_path / "mlx", sizes, 4, seed=1), 8, 1 << 20)
    assert one.digest == other.digest and one.targets == tuple(sorted(sizes))
    third = read_low_rank("c", write_adapter(tmp_path / "third", sizes, 4, seed=2), 8, 1 << 20)
    assert third.digest != one.digest and np.abs(third.pairs["model.layers.1.mlp.down_proj"][0]).max() > 0


def test_an_engine_and_mlx_lm_take_them(engine: Engine, tiny: Any, tmp_path: Path) -> None:
    sizes = layer_sizes(engine, SEVEN)
    folder = write_mlx_lm_adapter(tmp_path / "mlx", sizes, 4, seed=1)
    engine.load_adapter("a", folder)
    mine = engine.generate([1, 2, 3], max_tokens=5, temperature=0, adapter="a").token_ids
    with Engine(tiny("llama"), kv_memory="256KB", adapter=folder) as alone:
        assert alone.generate([1, 2, 3], max_tokens=5, temperature=0).token_ids == mine
