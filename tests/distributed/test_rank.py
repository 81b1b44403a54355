"""A rank opens its part of a model, tells what it has, and refuses what cannot be served. That ranks answer as one
process does is tested with real workers, in `test_engine_hosts.py`.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from cortexmlx.distributed.messages import ShardingMode
from cortexmlx.distributed.rank import open_rank
from cortexmlx.errors import HostRefused, ModelCorrupt
from cortexmlx.execution.execution_modes import choose_execution_mode
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.models import load_model
from support.hosts import models
from support.hosts.whole_ranks import options_for
from tests.architectures.weights import write_model


def test_a_rank_tells_what_the_model_has_and_keeps(tmp_path: Path) -> None:
    folder = models.write(tmp_path / "m", "gpt_oss")
    info = open_rank(options_for(folder, attention="auto"), mx.distributed.init()).info
    loaded = load_model(folder, dequantize=False)
    assert info.groups == choose_execution_mode(loaded.model).groups and len(info.groups) == 2
    assert (info.vocab_size, info.context_length, info.architecture) == (320, 512, "gpt_oss")
    assert (info.weight_bytes, info.parameters, info.dtype) == (loaded.weight_bytes, loaded.parameters, "float32")
    assert (info.whole_bytes, info.whole_parameters) == (loaded.weight_bytes, loaded.parameters)
    assert (info.identity, info.name) == (loaded.identity, str(folder)) and info.memory_bytes > 0


def test_a_runner_takes_groups_of_other_ranks_in_which_it_has_no_layers(tmp_path: Path) -> None:
    opened = open_rank(options_for(models.write(tmp_path / "m", "llama"), attention="auto"), mx.distributed.init())
    other = LayerGroup(KVSpec(2, 16, 16, "float32", window=9), ())
    runner = opened.make_runner([other, *opened.info.groups])
    assert runner.begin((4, 6)) is None and runner.blocks == (4, 6)
    assert runner.resize((8, 6)) is None and runner.shapes[0] == () and len(runner.shapes[1]) == 2
    runner.close()


def test_a_model_that_is_not_paged_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "deepseek_v32")
    with pytest.raises(HostRefused, match="cannot run on several hosts: deepseek_v32: an indexer"):
        open_rank(options_for(folder, attention="auto"), mx.distributed.init())


def test_damaged_weights_are_found_when_all_parts_are_loaded(tmp_path: Path) -> None:
    """Not before: a rank would wait in the pass for others that could not load theirs."""
    folder = models.write(tmp_path / "m", "llama")
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    weights["model.norm.weight"] *= mx.nan
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    opened = open_rank(options_for(folder, attention="auto", cut=ShardingMode.TENSOR), mx.distributed.init())
    with pytest.raises(ModelCorrupt, match="NaN"):
        opened.make_runner(opened.info.groups)
