"""Ranks that run their parts of a model answer as one process does that runs all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.distributed.messages import Cut, RankOptions
from cortexmlx.distributed.rank import open_rank
from cortexmlx.errors import HostRefused, ModelCorrupt
from cortexmlx.execution.execution_modes import execution_mode
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.models import load_model
from support.hosts import models
from support.hosts.compared import alone, same_tokens
from support.hosts.parts.ranks import by_mpi, by_ring, job
from support.hosts.parts.script import Asked, Script, hardships, ragged
from support.models.tiny import tokens_of
from tests.architectures.weights import write_model

Ranks = list[list[dict[str, Any]]]
TENSOR = ("llama", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5")
PIPELINE = ("qwen2", "qwen3_5")


def options(model: Path, **changes: Any) -> RankOptions:
    own: dict[str, Any] = {
        "model": str(model),
        "adapter": None,
        "dequantize": False,
        "kv_bits": None,
        "kv_group_size": None,
        "block_size": 8,
        "attention": "auto",
        "reproducible": False,
        "max_rows": 4,
        "prefill_budget": 32,
    }
    return RankOptions(**own | changes)


def compared(
    run: Callable[..., Ranks], hosts: int, folder: Path, jobs: list[tuple[Path, Script, str]]
) -> list[list[dict[str, Any]]]:
    """Run jobs on a group, and compare with one process. What the ranks came to, by job."""
    ranks = run(hosts, [job(*each) for each in jobs], folder)
    by_job = [list(each) for each in zip(*ranks, strict=True)]
    for (model, script, _), mine in zip(jobs, by_job, strict=True):
        same_tokens(model, script, alone(model, script), mine)
    return by_job


@pytest.mark.slow
def test_two_ranks_answer_as_one_process_does(tmp_path: Path) -> None:
    """Parts of tensors, and a pipeline: prompts of many lengths, some of which begin alike, greedy and seeded."""
    llama, qwen2 = (models.write(tmp_path / name, name) for name in ("llama", "qwen2"))
    jobs = [(llama, Script(ragged(seeded=True)), "auto"), (qwen2, Script(ragged()), "pipeline")]
    tensors, layers = compared(by_mpi, 2, tmp_path / "ranks", jobs)
    assert [rank["collectives"] for rank in tensors] == [
        {"all_sum": 5}
    ] * 2  # two in each of two layers, and the tokens
    assert layers[0]["collectives"] == {"recv_like": 1, "all_gather": 1, "all_sum": 1}
    assert layers[1]["collectives"] == {"send": 1, "all_gather": 1, "all_sum": 1}
    assert all(rank["cached_tokens"] > 30 for rank in [*tensors, *layers])


@pytest.mark.slow
def test_two_ranks_by_the_ring_answer_as_one_process_does(tmp_path: Path) -> None:
    asked = [Asked(tokens_of(9 + i, seed=i), 20, seed=i, params={"temperature": 0.7 * i}) for i in range(2)]
    folders = [models.write(tmp_path / name, name) for name in TENSOR[:-1]]
    by_job = compared(by_ring, 2, tmp_path / "ranks", [(folder, Script(asked), "tensor") for folder in folders])
    assert all(ranks[0]["collectives"]["all_sum"] > 1 for ranks in by_job)


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["tensor", "pipeline"])
def test_whatever_happens_on_the_way_two_ranks_answer_as_one_process_does(cut: str, tmp_path: Path) -> None:
    jobs = []
    for name in TENSOR if cut == "tensor" else PIPELINE:
        folder = models.write(tmp_path / name, name)
        jobs += [(folder, s, cut) for s in hardships(alone(folder, Script(ragged(seeded=True)))).values()]
    by_job = compared(by_mpi, 2, tmp_path / "ranks", jobs)
    assert sum(ranks[0]["preemptions"] for ranks in by_job) >= len(TENSOR if cut == "tensor" else PIPELINE)


@pytest.mark.slow
def test_two_ranks_quantize_keys_and_values_as_one_process_does(tmp_path: Path) -> None:
    llama = models.write(tmp_path / "llama", "llama", head_dim=32)
    qwen3_5 = models.write(tmp_path / "qwen3_5", "qwen3_5", head_dim=32)
    script = Script(ragged(), {"kv_bits": 8, "kv_group_size": 32})
    compared(by_mpi, 2, tmp_path / "ranks", [(llama, script, "tensor"), (qwen3_5, script, "pipeline")])


@pytest.mark.slow
def test_four_ranks_answer_as_one_process_does(tmp_path: Path) -> None:
    jobs = []
    for name, cut in [*((name, "tensor") for name in TENSOR[:-1]), *((name, "pipeline") for name in PIPELINE)]:
        folder = models.write(tmp_path / f"{name} {cut}", name)
        jobs.append((folder, Script(ragged(seeded=True)), cut))
    compared(by_mpi, 4, tmp_path / "ranks", jobs)


@pytest.mark.slow
@pytest.mark.model
def test_the_starter_model_runs_on_three_ranks_and_not_on_two(tmp_path: Path) -> None:
    starter = Path("smollm2")
    script = Script([Asked(tokens_of(12, seed=i), 12, after=3 * i, seed=i) for i in range(2)])
    for rank in by_mpi(2, [job(starter, script)], tmp_path / "two"):
        assert "9 attention heads and 3 key-value heads cannot be divided by 2" in rank[0]["error"]
        assert rank[0]["error"].endswith("3 hosts would do.")
    ranks = by_mpi(3, [job(starter, script)], tmp_path / "three")
    assert [rank[0]["tokens"] for rank in ranks] == [alone(starter, script)] * 3


def test_a_rank_tells_what_the_model_has_and_keeps(tmp_path: Path) -> None:
    folder = models.write(tmp_path / "m", "gpt_oss")
    info = open_rank(options(folder), mx.distributed.init()).info
    loaded = load_model(folder, dequantize=False)
    assert info.groups == execution_mode(loaded.model).groups and len(info.groups) == 2
    assert (info.vocab_size, info.context_length, info.architecture) == (320, 512, "gpt_oss")
    assert (info.weight_bytes, info.parameters, info.dtype) == (loaded.weight_bytes, loaded.parameters, "float32")
    assert (info.whole_bytes, info.whole_parameters) == (loaded.weight_bytes, loaded.parameters)
    assert (info.identity, info.name) == (loaded.identity, str(folder)) and info.memory_bytes > 0


def test_a_runner_takes_groups_of_other_ranks_in_which_it_has_no_layers(tmp_path: Path) -> None:
    opened = open_rank(options(models.write(tmp_path / "m", "llama")), mx.distributed.init())
    other = LayerGroup(KVSpec(2, 16, 16, "float32", window=9), ())
    runner = opened.arrange([other, *opened.info.groups])
    assert runner.begin((4, 6)) is None and runner.blocks == (4, 6)
    assert runner.resize((8, 6)) is None and runner.shapes[0] == () and len(runner.shapes[1]) == 2
    runner.close()


def test_a_model_that_is_not_paged_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "deepseek_v32")
    with pytest.raises(HostRefused, match="cannot run on several hosts: deepseek_v32: an indexer"):
        open_rank(options(folder), mx.distributed.init())


def test_damaged_weights_are_found_when_all_parts_are_loaded(tmp_path: Path) -> None:
    """Not before: a rank would wait in the pass for others that could not load theirs."""
    folder = models.write(tmp_path / "m", "llama")
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    weights["model.norm.weight"] *= mx.nan
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    opened = open_rank(options(folder, cut=Cut.TENSOR), mx.distributed.init())
    with pytest.raises(ModelCorrupt, match="NaN"):
        opened.arrange(opened.info.groups)
