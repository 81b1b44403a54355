"""Bugs that others met in engines like this one, one test for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cortexmlx import Engine, KVBlockAllocator, SamplingParams
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of


def test_after_prefill_the_length_is_that_of_the_prompt(tiny: Any, theirs: Any) -> None:
    """Off by one: the token just sampled has no key and value yet."""
    prompt = tokens_of(16, seed=1)
    driver = Driver(tiny("llama"), pipeline=False)
    handle = driver.add(prompt, 10)
    job = next(iter(driver.core.requests.answers.values())).job
    commit, lengths = driver.core.scheduler.commit, []

    def committed(*result: Any) -> Any:
        told = commit(*result)
        if job.is_running:
            lengths.append((driver.core.cache.tables.length(job.id), len(job.tokens)))
        return told

    driver.core.scheduler.commit = committed
    while not job.num_generated:
        driver.step()
    assert lengths == [(len(prompt), len(prompt) + 1)]
    driver.finish()
    assert list(driver.result(handle).token_ids) == theirs("llama", prompt, 10)


def test_slots_have_one_dimension(tiny: Any) -> None:
    """Extra brackets around an index: a two-dimensional gather reads something else and says nothing."""
    driver = Driver(tiny("llama"))
    driver.add(tokens_of(20), 5)
    plan = driver.core.scheduler.plan(0)
    assert plan is not None and plan.groups is not None
    assert plan.writes[0].slots.ndim == 1 and plan.positions.ndim == 1
    assert plan.groups[0].tables.ndim == 2 and plan.groups[0].lengths.ndim == 1


def test_every_layer_has_its_own_keys(tiny: Any) -> None:
    """A forgotten layer index: all layers share the first one's memory, and the answer is noise."""
    driver = Driver(tiny("windowed llama"))
    driver.add(tokens_of(20), 5)
    driver.step(3)
    arena = driver.core.runner.arena
    blocks = min(arena.blocks) * arena.block_size  # layers with windows have fewer
    stored = [np.array(arena.slab(layer)[0][:, :blocks]) for layer in range(3)]
    assert all(s.any() for s in stored)
    assert not any(np.allclose(a, b) for i, a in enumerate(stored) for b in stored[:i])


def test_indices_are_int32_from_plan_to_arena(tiny: Any) -> None:
    """The wrong integer type: silently wrong on one device, an error on the other."""
    driver = Driver(tiny("llama"))
    driver.add(tokens_of(40), 5)
    driver.add([7], 5)
    plan = driver.core.scheduler.plan(0)
    assert plan is not None and plan.groups is not None and plan.tokens is not None
    group, write = plan.groups[0], plan.writes[0]
    arrays = (plan.tokens, plan.positions, plan.token_index, plan.logit_rows, group.tables, group.lengths)
    assert {a.dtype for a in (*arrays, write.slots, write.zeros)} == {np.dtype(np.int32)}


def test_freed_blocks_are_handed_out_again() -> None:
    """A misspelt attribute: the free list grows somewhere else, and memory leaks once blocks are reused."""
    allocator = KVBlockAllocator(4)
    for _ in range(3):
        handle = allocator.allocate(4)
        assert allocator.free_blocks == 0
        allocator.free(handle)
        assert allocator.free_blocks == 4
    with pytest.raises(AttributeError):
        allocator.free_block  # noqa: B018


def test_the_engine_prints_nothing(tiny: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A print left behind in the forward pass."""
    with Engine(tiny("llama"), kv_memory="128KB") as engine:
        engine.generate_batch([tokens_of(9), tokens_of(20)], SamplingParams(max_tokens=20))
        engine.stats()
    assert capfd.readouterr() == ("", "")
