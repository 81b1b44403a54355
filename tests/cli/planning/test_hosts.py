"""What each of several hosts has of a model, by the arithmetic of the published shapes."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.cli.planning.figures import make_plan
from cortexmlx.cli.planning.hosts import DistributedFigures, plan_hosts
from cortexmlx.cli.planning.machine import TargetMachine, mac_with_memory
from cortexmlx.cli.planning.skeleton import build_skeleton
from cortexmlx.cli.planning.source import PlanSource
from cortexmlx.kv.sizing import ArenaDemand
from support.models.published import DEEPSEEK_V3, GEMMA3_1B, QWEN3_8B

MAC = mac_with_memory(64 << 30)
LOAD = ArenaDemand(16, 512)
SHORT = {**DEEPSEEK_V3, "num_hidden_layers": 7}
QWEN3 = {**QWEN3_8B, "num_hidden_layers": 4}


def hosts_of(
    config: dict[str, Any], hosts: int, machine: TargetMachine = MAC, kv_bits: int | None = None
) -> DistributedFigures:
    skeleton = build_skeleton(config).with_quantized_kv(kv_bits, None)
    plan = make_plan(PlanSource("it", config, None), skeleton, machine, load=LOAD)
    return plan_hosts("it", skeleton, machine, plan.here, LOAD, hosts, (kv_bits, None))


@pytest.mark.parametrize("hosts", [2, 4])
def test_a_tensor_part_has_its_share_of_each_layer_and_whole_embeddings(hosts: int) -> None:
    figures = hosts_of(QWEN3, hosts)
    matrices = 4 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288)
    embeddings, norms = 2 * 151_936 * 4096, 4 * (2 * 4096 + 2 * 128) + 4096
    share = matrices // hosts + embeddings + norms
    assert figures.way == "tensor" and figures.would_do == (2, 4, 8) and figures.refusal is None
    assert [part.weight_bytes for part in figures.ranks] == [2 * share] * hosts
    assert {(part.layers, part.kv_bytes_per_token) for part in figures.ranks} == {(4, 16_384 // hosts)}
    assert [part.rank for part in figures.ranks] == list(range(hosts))
    for part in figures.ranks:
        tails, logits = 2 * 16 * 16 * part.kv_bytes_per_token, 16 * 151_936 * 4
        assert part.free_bytes == MAC.working_set - part.weight_bytes - tails - logits
        assert part.fits == part.free_bytes // part.kv_bytes_per_token


def test_on_a_cpu_parts_are_float32() -> None:
    figures = hosts_of(QWEN3, 2, TargetMachine(200 << 30, 150 << 30, on_cpu=True))
    assert figures.ranks[0].kv_bytes_per_token == 16_384
    assert figures.ranks[0].weight_bytes == 2 * hosts_of(QWEN3, 2).ranks[0].weight_bytes


def test_quantized_keys_and_values_are_counted_with_their_scales() -> None:
    assert hosts_of(QWEN3, 2, kv_bits=8).ranks[0].kv_bytes_per_token == 16_384 // 4 * 68 // 64


def test_a_pipeline_has_whole_layers_the_first_rank_the_last_ones() -> None:
    """Seven layers over three hosts. The first three layers are dense, and smaller."""
    figures = hosts_of(SHORT, 3)
    assert figures.way == "pipeline"
    assert [part.layers for part in figures.ranks] == [3, 2, 2]
    assert [part.kv_bytes_per_token for part in figures.ranks] == [layers * 576 * 2 for layers in (3, 2, 2)]
    first, second, third = (part.weight_bytes for part in figures.ranks)
    whole = build_skeleton(SHORT).weight_bytes
    outside = (first + second + third - whole) / 2  # embeddings and head are in each of the three
    assert outside == pytest.approx(2 * 2 * 129_280 * 7168, rel=0.01)
    assert first > second > third


def test_a_latent_is_whole_on_every_host() -> None:
    assert {part.kv_bytes_per_token for part in hosts_of(SHORT, 2).ranks} == {7 * 576 * 2}


def test_what_cannot_be_cut_is_said_with_the_numbers_that_would_do() -> None:
    three = hosts_of(QWEN3, 3)
    assert three.way is None and three.ranks == () and three.would_do == (2, 4, 8)
    assert three.refusal is not None
    assert three.refusal.startswith("it cannot be cut for 3 hosts: ") and three.refusal.endswith(
        "2, 4 or 8 hosts would do."
    )
    none = hosts_of(GEMMA3_1B, 2)
    assert none.refusal is not None and "gemma3_text" in none.refusal and none.would_do == ()


def test_a_model_that_runs_on_mlx_lms_caches_is_not_spread(unpaged: None) -> None:
    figures = hosts_of(QWEN3, 2)
    assert figures.way is None and figures.refusal is not None and "it cannot run on several hosts" in figures.refusal
