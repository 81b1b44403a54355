"""The engine's work step by step: requests that are cancelled at any of them."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.errors import CortexError, ModelCorrupt, NoTokenToChoose
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.types.request import FinishReason, RequestState
from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.refusals import Refusals
from support.models.tiny import tokens_of, write_tiny

PROMPT = tokens_of(20, seed=1)


@pytest.mark.parametrize("steps", (0, 3, 4, 22))
def test_cancelling_at_any_step_keeps_the_tokens_so_far_and_the_neighbours(tiny: Any, theirs: Any, steps: int) -> None:
    """Fifty tokens are prefilled in four pieces, then decoded across the end of a window."""
    driver = Driver(tiny("one layer"), prefill_budget=16)
    prompt, other = tokens_of(50, seed=2), tokens_of(9, seed=3)
    neighbour = driver.add(other, 40)
    handle = driver.add(prompt, 60)
    driver.step(steps)
    handle.cancel()
    completion = driver.result(handle)
    assert completion.finish_reason is FinishReason.CANCELLED and handle.state is RequestState.CANCELLED
    assert list(completion.token_ids) == theirs("one layer", prompt, 60)[: len(completion.token_ids)]
    handle.cancel()
    driver.finish()
    assert list(driver.result(neighbour).token_ids) == theirs("one layer", other, 40)
    assert_nothing_lost(driver.core.stats())


def test_a_waiting_request_is_cancelled_before_it_runs(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), max_rows=1)
    first, second = driver.add(PROMPT, 20), driver.add(PROMPT, 20)
    driver.step(3)
    second.cancel()
    assert driver.result(second).token_ids == ()
    driver.finish()
    assert len(driver.result(first).token_ids) == 20
    stats = driver.core.stats()
    assert stats.prompt_tokens == stats.prefilled_tokens == len(PROMPT), "nothing of the second was looked up"
    assert_nothing_lost(stats)


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU takes the next step without being waited for")
def test_first_tokens_are_handed_out_before_a_cpu_takes_the_next_step(tiny: Any) -> None:
    driver = Driver(tiny("one layer"))
    runner, order, in_flight = driver.core.runner, [], deque()
    dispatch, collect = runner.dispatch, runner.collect

    def watched_dispatch(plan: StepPlan) -> Any:
        order.append(("dispatch", plan.kind.name))
        in_flight.append(plan.kind.name)
        return dispatch(plan)

    def watched_collect() -> Any:
        order.append(("collect", in_flight.popleft()))
        return collect()

    runner.dispatch, runner.collect = watched_dispatch, watched_collect
    driver.add(PROMPT, 4)
    driver.finish()
    assert order[:5] == [
        ("dispatch", "MIXED"),
        ("collect", "MIXED"),
        ("dispatch", "DECODE"),
        ("dispatch", "DECODE"),  # and these one step ahead
        ("collect", "DECODE"),
    ]


@pytest.mark.parametrize("changes", [{"rope_theta": 0.0}, {"rope_theta": -2.0}])
def test_a_model_that_computes_no_numbers_is_refused_and_answers_nothing(tmp_path: Path, changes: Any) -> None:
    with pytest.raises(ModelCorrupt, match="produces NaN logits"):
        Driver(write_tiny(tmp_path / "m", **changes))


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    weights: Any = dict(mx.load(str(folder / "model.safetensors")))
    norm = weights["model.layers.1.input_layernorm.weight"]
    weights["model.layers.1.input_layernorm.weight"] = mx.where(mx.arange(norm.size) == 3, float("nan"), norm)
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(ModelCorrupt, match=r"weights are damaged.*Download it again"):
        Driver(folder)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}], ids=str)
def test_a_model_whose_logits_become_nan_fails_the_request_and_goes_on_when_they_are_numbers_again(
    tiny: Any, theirs: Any, params: dict[str, Any]
) -> None:
    driver = Driver(tiny("one layer"))
    norm = driver.core.loaded.model.model.norm.norm
    weight = norm.weight
    handle = driver.add(tokens_of(9), 20, **params)
    driver.step(4)
    norm.weight = weight * mx.nan
    driver.finish()
    with pytest.raises(NoTokenToChoose, match=r"NaN, or all -inf, after 9 tokens of the prompt and \d+ of the answer"):
        driver.result(handle)
    norm.weight = weight
    assert_nothing_lost(driver.core.stats())
    (again,) = driver.answers([tokens_of(9)], 20, ignore_eos=False)
    assert list(again) == theirs("one layer", tokens_of(9), 20)


# The core moves blocks together while nothing runs: what is free becomes one run, what is cached is found again.


def scattered(driver: Driver) -> list[list[int]]:
    """Cache eight texts, then evict every other one. Returns those that stay."""
    texts = [tokens_of(60, seed=i) for i in range(8)]
    driver.answers(texts, 1)
    cache = driver.core.cache
    for text in texts[::2]:  # touched last, so the others go first
        match = cache.match(text, cache.prefix.keys(text), 60)
        cache.allocate_for(999, 56, match=replace(match, partial=None, partial_tokens=0))
        cache.free(999)
    gone = cache.pools.unused_entries - 4 * 7
    cache.pools.drop_cached(gone)
    return texts[::2]


@pytest.mark.parametrize("name", ["windowed llama"])
def test_cached_texts_survive_compaction(tiny: Any, theirs: Any, name: str) -> None:
    driver = Driver(tiny(name), tokens=1024)
    kept = scattered(driver)
    before = driver.core.stats()
    assert before.fragmentation > 0
    moved = driver.core.compact()
    after = driver.core.stats()
    assert moved > 0 == after.fragmentation and driver.core.compact() == 0
    assert (after.cached_blocks, after.total_blocks) == (before.cached_blocks, before.total_blocks)
    driver.core.cache.check_invariants()
    for text in kept:
        done = driver.result_of(text, 20)
        assert done.usage.cached_tokens == 56
        assert list(done.token_ids) == theirs(name, text, 20)
    assert_nothing_lost(driver.core.stats())


def test_nothing_moves_while_a_row_runs(tiny: Any, theirs: Any) -> None:
    driver = Driver(tiny("one layer"), tokens=1024)
    kept = scattered(driver)
    handle = driver.add(kept[0], 30)
    driver.step(4)
    assert driver.core.compact() == 0
    driver.core.tidy()
    driver.finish()
    assert list(driver.result(handle).token_ids) == theirs("one layer", kept[0], 30)


def test_after_compaction_the_free_end_can_be_given_back(tiny: Any, theirs: Any) -> None:
    driver = Driver(tiny("one layer"), tokens=1024)
    kept = scattered(driver)
    blocks = driver.core.cache.pools.blocks
    driver.core.compact()
    driver.core.cache.pools.shrink(1)
    assert driver.core.cache.pools.blocks == (driver.core.stats().cached_blocks,) < blocks
    assert driver.answers(kept, 12) == [tuple(theirs("one layer", t, 12)) for t in kept]


def test_an_idle_engine_tidies_up_only_when_it_is_badly_fragmented(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), tokens=512)
    driver.answers([tokens_of(60, seed=1)], 1)
    table = driver.core.cache.pools[0].allocator.block_map()
    driver.core.tidy()
    assert driver.core.cache.pools[0].allocator.block_map() == table


# -- What an engine says of itself ------------------------------------------------------------------------------------


def test_preemption_says_so_in_the_statistics(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), tokens=104, max_rows=4)
    handles = [driver.add(tokens_of(20, seed=i), 50) for i in range(4)]
    lines: set[str] = set()
    while not driver.core.idle:
        driver.step()
        lines |= set(driver.core.stats().sequences)
    assert all(len(driver.result(h).token_ids) == 50 for h in handles)
    assert any("preempted: " in line and "preempted 1 times" in line for line in lines)
    assert driver.core.stats().preemptions > 0


def test_who_begins_again_because_memory_was_refused_was_not_preempted(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), tokens=1024, max_rows=4)
    handles = [driver.add(tokens_of(20, seed=i), 50) for i in range(2)]
    driver.step(5)
    refusals = Refusals(driver.core, lambda plan: None if refusals.count else "under way")
    driver.step()
    stats = driver.core.stats()
    assert (stats.preemptions, stats.restarts) == (0, 2)
    assert len(stats.sequences) == 2 and not any("preempted 1" in line for line in stats.sequences)
    driver.core.fail_all(CortexError("it broke"))
    assert all(handle.ended for handle in handles)
    assert (driver.core.stats().preemptions, driver.core.stats().restarts) == (0, 2), "who failed did not begin again"


def test_a_prompt_that_began_again_is_counted_once_as_cached(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), tokens=1024, max_rows=4)
    driver.answers([tokens_of(30, seed=30)], 5)
    driver.add(tokens_of(30, seed=30), 50)
    driver.step(5)
    driver.core.drain()
    driver.core.scheduler.restart_rows()
    driver.answers([], 5)
    assert driver.core.stats().cached_tokens == 29


def test_an_engine_that_begins_anew_counts_anew(tiny: Any) -> None:
    """All of it: else a share, such as that of the tokens that were cached, would be of other requests."""
    driver = Driver(tiny("one layer"), tokens=1024, max_rows=4)
    for _ in range(2):
        driver.answers([tokens_of(30, seed=30)], 5)
    driver.core.reset()
    for _ in range(2):
        driver.answers([tokens_of(30, seed=30)], 5)
    stats = driver.core.stats()
    assert (stats.requests_finished, stats.prompt_tokens, stats.cached_tokens) == (2, 60, 29)
    assert stats.hit_rate == 29 / 60 and stats.queued.count == 2


def test_the_numbers_of_an_idle_engine_are_those_of_its_answers(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), tokens=1024, max_rows=2)
    lengths, limit = (30, 9, 17), 12
    driver.answers([tokens_of(n, seed=n) for n in lengths], limit)
    driver.answers([tokens_of(30, seed=30)], limit)
    stats, core = driver.core.stats(), driver.core
    assert (stats.prompt_tokens, stats.generated_tokens, stats.requests_finished) == (sum(lengths) + 30, 4 * limit, 4)
    assert stats.prefilled_tokens == stats.prompt_tokens - stats.cached_tokens
    assert stats.cached_tokens == 29, "of a prompt that was there before, all but the last token"
    assert (stats.queued.count, stats.time_to_first_token.count, stats.inter_token.count) == (4, 4, 4 * (limit - 1))
    assert 0 < stats.tokens_per_second == 4 * limit / core.measurements.busy_timer.seconds
    assert stats.kv_bytes == sum(a.nbytes for a in core.runner.arena.arrays())
    assert stats.kv_bytes_limit == 1024 * core.info.kv_bytes_per_token
    assert (stats.steps, stats.preemptions, stats.sequences) == (core.scheduler.planned_steps, 0, ())
    assert stats.attention_backend == "reference" and stats.max_rows == 2 and stats.block_size == 8
    assert_nothing_lost(stats)


def test_running_requests_are_told_with_their_blocks(tiny: Any) -> None:
    driver = Driver(tiny("windowed llama"), tokens=512, max_rows=2)
    for n in (30, 9, 17):
        driver.add(tokens_of(n, seed=n), 20)
    driver.step(2)
    stats, cache = driver.core.stats(), driver.core.cache
    jobs = driver.core.scheduler.jobs
    assert (stats.rows_running, stats.rows_waiting, len(stats.sequences)) == (2, 1, 3)
    blocks = [{int(b) for j in jobs[:2] for b in cache.tables.block_table(j.id, g)} for g in range(len(cache.groups))]
    assert stats.used_blocks == sum(map(len, blocks)) and stats.total_blocks == stats.used_blocks + stats.free_blocks
    assert stats.kv_bytes_in_use >= sum(
        len(used) * 8 * group.bytes_per_token for used, group in zip(blocks, cache.groups, strict=True)
    )
    for job, line in zip(jobs, stats.sequences, strict=True):
        counts = f"{job.prompt_length} + {job.num_generated} of at most {job.prompt_length + 20} tokens, 0 cached"
        assert line.startswith(f"{job.state.value}: {counts}") and (" blocks " in line) == job.is_running
    numbers = [(each.state, each.prompt_tokens, each.computed_tokens, each.max_tokens) for each in stats.requests]
    assert numbers == [(job.state, job.prompt_length, job.num_computed_tokens, 20) for job in jobs]
    assert cache.tables.describe(jobs[0].id) in stats.sequences[0]
    assert stats.single_run_share == 1.0
