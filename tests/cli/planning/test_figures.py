"""The figures of a plan, on machines of known memory."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.cli.planning import figures
from cortexmlx.cli.planning.figures import make_plan
from cortexmlx.cli.planning.machine import TargetMachine
from cortexmlx.cli.planning.skeleton import build_skeleton
from cortexmlx.cli.planning.source import PlanSource
from cortexmlx.errors import InvalidRequest, ModelUnsupported
from cortexmlx.kv.sizing import ArenaDemand
from cortexmlx.scheduling.keep_policy import KeepPolicy
from support.models.published import GEMMA3_1B, MAMBA, QWEN3_8B

MAC = TargetMachine(memory=48 * 2**30, working_set=36 * 2**30)


def plan_of(
    config: dict[str, Any], machine: TargetMachine = MAC, kv_bits: int | None = None, **options: Any
) -> figures.MemoryPlan:
    skeleton = build_skeleton(config).with_quantized_kv(kv_bits, None)
    return make_plan(PlanSource("it", config, None), skeleton, machine, load=ArenaDemand(16, 512), **options)


def test_what_fits_a_mac_is_what_its_memory_leaves() -> None:
    plan = plan_of(QWEN3_8B, lengths=(8192,))
    assert plan.model.kv_bytes_per_token == plan.here.kv_bytes_per_token == 147_456
    left = 36 * 2**30 - 2 * 8_190_735_360 - 2 * 16 * 16 * 147_456 - 16 * 151_936 * 4
    assert plan.here.free_bytes == left and plan.here.fits == left // 147_456
    assert plan.here.arena_bytes == left // 2
    assert plan.here.lengths[0].sequences == left // (8192 * 147_456)
    assert plan_of(QWEN3_8B, kv_memory=2**30).here.arena_tokens == 2**30 // 147_456 // 32 * 32
    lengths = plan_of(QWEN3_8B, kv_memory=2**30, lengths=(3000, 4000)).here.lengths
    assert [entry.sequences for entry in lengths] == [2, 1], "of 227 blocks 94 and 125 make a sequence"
    with pytest.raises(InvalidRequest, match=r"of 48\.1 GiB is more than this machine has: 48 GiB, 36 GiB of it for"):
        plan_of(QWEN3_8B, kv_memory=481 * 2**30 // 10)


def test_quantized_keys_and_values_are_counted_with_their_scales() -> None:
    """Of 64 numbers in bfloat16 there are 64 codes, a scale and a bias."""
    plain, eight, four = (plan_of(QWEN3_8B, kv_bits=bits) for bits in (None, 8, 4))
    assert [p.here.kv_form for p in (plain, eight)] == ["2 bytes per number", "8 bits in groups of 64"]
    assert eight.model.kv_bytes_per_token == eight.here.kv_bytes_per_token == 147_456 // 2 * 68 // 64
    assert four.here.kv_bytes_per_token == 147_456 // 2 * 36 // 64
    assert eight.here.fits is not None and plain.here.fits is not None and eight.here.fits >= 1.85 * plain.here.fits
    on_cpu = plan_of(QWEN3_8B, TargetMachine(96 * 2**30, 72 * 2**30, on_cpu=True), kv_bits=8)
    assert on_cpu.here.kv_bytes_per_token == 147_456 // 2 * 72 // 64, "scales are float32, as the model's numbers are"
    with pytest.raises(ModelUnsupported, match="no layer keeps keys and values"):
        plan_of(MAMBA, kv_bits=8)


def test_a_model_that_is_not_paged_is_not_quantized(unpaged: None) -> None:
    with pytest.raises(ModelUnsupported, match="kv_bits is 8, which paged attention alone has"):
        plan_of(QWEN3_8B, kv_bits=8)


def test_on_a_cpu_everything_is_float32_where_that_pays() -> None:
    small = plan_of(GEMMA3_1B, TargetMachine(32 * 2**30, 24 * 2**30, on_cpu=True)).here
    assert (small.weight_bytes, small.itemsize) == (4 * 999_885_952, 4)
    quantized = {**QWEN3_8B, "quantization": {"group_size": 64, "bits": 4}}
    large = plan_of(quantized, TargetMachine(32 * 2**30, 24 * 2**30, on_cpu=True)).here
    assert large.weight_bytes == pytest.approx(8_190_735_360 * 5 / 8, rel=0.001)
    assert large.weights_as == "quantized as stored, the rest float32"


def test_a_row_that_keeps_a_part_takes_no_more_however_long_its_text_is() -> None:
    whole = plan_of(QWEN3_8B, lengths=(4096, 32768))
    kept = plan_of(QWEN3_8B, lengths=(4096, 32768), keep=KeepPolicy(96, 4000)).here
    assert kept.row_tokens == 8096 and whole.here.row_tokens is None
    assert kept.lengths[0] == whole.here.lengths[0] and kept.lengths[1].bytes == 8096 * 147_456
    assert kept.arena_bytes == 4 * 8096 * 147_456, "four rows of what they can have"
    with pytest.raises(InvalidRequest, match="the KV cache holds 7264: make keep_last at most 3584"):
        plan_of(QWEN3_8B, keep=KeepPolicy(96, 4000), kv_memory=2**30)


def test_no_more_sequences_fit_than_the_engine_runs(unpaged: None) -> None:
    assert [entry.sequences for entry in plan_of(QWEN3_8B, lengths=(4096, 8192)).here.lengths] == [1, 1]
    tight = TargetMachine(memory=24 * 2**30, working_set=18 * 2**30)
    assert plan_of(QWEN3_8B, tight, lengths=(40960,)).here.lengths[0].sequences == 0
