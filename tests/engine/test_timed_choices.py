"""The same tokens whatever way computes attention: each way forced for a whole engine, choices that were timed, and an
engine whose attention has the same bits alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.attention.autotuning import attention_jobs
from cortexmlx.attention.decode_methods import DecodeMethod, probe_layer_shapes
from cortexmlx.attention.paged import AttentionParams, PagedKV
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import LayerGroup
from cortexmlx.kv.step import GroupStep
from cortexmlx.metal.lab import sim
from support.engine.core_driver import Driver
from support.engine.judge import assert_same
from support.models.tiny import tokens_of, write_tiny

PROMPTS = [tokens_of(n, seed=n) for n in (5, 41, 17, 30)]
TOKENS = 36


def force(driver: Driver, way: DecodeMethod) -> int:
    """Let a way serve every class that it can serve. Returns how many."""
    choosing = driver.core.backend.selectable
    assert choosing is not None
    layers = probe_layer_shapes(driver.core.loaded.model, driver.core.runner.arena)
    jobs = attention_jobs(layers, choosing, 4, 512)
    ways = {key: way for key, job in jobs.items() if way.value in job.candidate_names}
    choosing.choices.set_methods(ways)
    return len(ways)


@pytest.mark.parametrize(("name", "way"), [("windowed llama", DecodeMethod.VIEW), ("gpt_oss", DecodeMethod.GATHER)])
def test_each_way_gives_mlx_lms_tokens(
    name: str, way: DecodeMethod, tiny: Callable[[str], Path], judged: Any, theirs: Any
) -> None:
    """In a batch whose rows end one after the other, and alone."""
    driver = Driver(tiny(name))
    assert force(driver, way) > 0
    for prompt, mine in zip(PROMPTS, driver.answers(PROMPTS, TOKENS, ignore_eos=False), strict=True):
        assert_same(judged(name)[0], prompt, mine, theirs(name, prompt, TOKENS))
    [alone] = driver.answers(PROMPTS[1:2], TOKENS, ignore_eos=False)
    assert_same(judged(name)[0], PROMPTS[1], alone, theirs(name, PROMPTS[1], TOKENS))


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "llama4"])
def test_a_reproducible_engine_gives_mlx_lms_tokens(
    name: str, tiny: Callable[[str], Path], judged: Any, theirs: Any
) -> None:
    driver = Driver(tiny(name), reproducible=True)
    for prompt, mine in zip(PROMPTS, driver.answers(PROMPTS, TOKENS, ignore_eos=False), strict=True):
        assert_same(judged(name)[0], prompt, mine, theirs(name, prompt, TOKENS))


@pytest.mark.lab
@pytest.mark.parametrize("way", [DecodeMethod.VECTOR, DecodeMethod.MATRIX, DecodeMethod.GATHER])
def test_each_kernel_gives_the_reference_paths_tokens(way: DecodeMethod, tmp_path: Path) -> None:
    """Heads that two kernels serve, in the simulator."""
    import mlx_lm

    folder = write_tiny(tmp_path, "llama", num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    wanted = Driver(folder, attention="reference").answers(PROMPTS[:2], 12)
    with sim.options(checked=False):
        driver = Driver(folder, attention="sim")
        assert force(driver, way) > 0
        got = driver.answers(PROMPTS[:2], 12)
    model = mlx_lm.load(str(folder))[0]
    for prompt, mine, theirs in zip(PROMPTS, got, wanted, strict=False):
        assert_same(model, prompt, mine, theirs)
    used = driver.core.backend.kernels()
    assert (way.value.removesuffix(" kernel") in used) == (way is not DecodeMethod.GATHER)


def test_an_engine_whose_ways_are_timed_gives_the_same_tokens(
    tiny: Callable[[str], Path], judged: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CORTEXMLX_TIMED_CHOICE", "1")
    driver = Driver(tiny("llama"))
    assert driver.core.stats().choices
    for prompt, mine in zip(PROMPTS, driver.answers(PROMPTS, TOKENS, ignore_eos=False), strict=True):
        assert_same(judged("llama")[0], prompt, mine, theirs("llama", prompt, TOKENS))


@pytest.mark.parametrize("attention", ["reference", pytest.param("sim", marks=pytest.mark.lab)])
def test_a_reproducible_engines_attention_has_the_same_bits_alone_and_in_a_batch(
    attention: str, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row of each decode step is attended to again: alone, as one run, and without a tail."""
    driver = Driver(tiny("one layer"), attention=attention, reproducible=True)
    attend = driver.core.runner._attend
    rows = []

    def alone(query: mx.array, kv: PagedKV, row: int, params: AttentionParams) -> mx.array:
        length, size = int(kv.step.lengths[row]), kv.arena.block_size
        position = np.arange(length)
        slots = mx.array((kv.step.tables[row, position // size] * size + position % size).astype(np.int32))
        assert kv.tail is not None
        seen = [
            mx.concatenate([mx.take(slab, slots, axis=1), tail[row, :, : kv.tail_tokens]], axis=1)
            for slab, tail in zip(kv.arena.slab(0), kv.tail, strict=True)
        ]
        tokens = seen[0].shape[1]
        blocks = -(-tokens // size)
        arena = KVArena([LayerGroup(kv.arena.spec(0), (0,))], blocks, size)
        arena.write(0, slice(0, tokens), *seen)
        tables, lengths = np.arange(blocks, dtype=np.int32)[None], np.array([tokens], np.int32)
        step = GroupStep(tables, lengths, (KVHandle(0, blocks),), (), kv.step.attention_window)
        return attend(query, PagedKV(arena, 0, step, None, 0, kv.dtype, attend), params)

    def noting(queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
        out = attend(queries, kv, params)
        for row in range(kv.step.rows if kv.tail is not None else 0):
            again = alone(queries[row : row + 1], kv, row, params)
            assert np.array_equal(np.array(out[row : row + 1]), np.array(again))
            rows.append(kv.step.rows)
        return out

    monkeypatch.setattr(driver.core.runner, "_attend", noting)
    with sim.options(checked=False):
        driver.answers(PROMPTS, 20 if attention == "reference" else 8)
    assert len(rows) >= 20 and max(rows) == len(PROMPTS)


def test_a_reproducible_engine_rotates_a_token_in_one_way_whatever_step_computes_it(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour's prompt turns a decode step into one that MLX's own operations rotate. Attention's queries are those
    of the model in all of them.
    """
    driver = Driver(tiny("qwen3"), attention="sim", reproducible=True)
    attend, kinds = driver.core.runner._attend, set()

    def noting(queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
        kinds.add((kv.tail is not None, kv.replace_queries is None))
        return attend(queries, kv, params)

    monkeypatch.setattr(driver.core.runner, "_attend", noting)
    with sim.options(checked=False):
        driver.add(PROMPTS[0], 12)
        driver.step(4)
        driver.answers(PROMPTS[1:2], 4)
    assert kinds == {(True, True), (False, True)}
