"""What an engine says of itself."""

from __future__ import annotations

from typing import Any

from cortexmlx.errors import CortexError
from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.refusals import Refusals
from support.models.tiny import tokens_of


def test_preemption_says_so_in_the_statistics(tiny: Any) -> None:
    driver = Driver(tiny("llama"), tokens=104, max_rows=4)
    handles = [driver.add(tokens_of(20, seed=i), 50) for i in range(4)]
    lines: set[str] = set()
    while not driver.core.idle:
        driver.step()
        lines |= set(driver.core.stats().sequences)
    assert all(len(driver.result(h).token_ids) == 50 for h in handles)
    assert any("preempted: " in line and "preempted 1 times" in line for line in lines)
    assert driver.core.stats().preemptions > 0


def test_who_begins_again_because_memory_was_refused_was_not_preempted(tiny: Any) -> None:
    driver = Driver(tiny("llama"), tokens=1024, max_rows=4)
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
    driver = Driver(tiny("llama"), tokens=1024, max_rows=4)
    driver.answers([tokens_of(30, seed=30)], 5)
    driver.add(tokens_of(30, seed=30), 50)
    driver.step(5)
    driver.core.drain()
    driver.core.scheduler.restart_rows()
    driver.answers([], 5)
    assert driver.core.stats().cached_tokens == 29


def test_an_engine_that_begins_anew_counts_anew(tiny: Any) -> None:
    """All of it: else a share, such as that of the tokens that were cached, would be of other requests."""
    driver = Driver(tiny("llama"), tokens=1024, max_rows=4)
    for _ in range(2):
        driver.answers([tokens_of(30, seed=30)], 5)
    driver.core.reset()
    for _ in range(2):
        driver.answers([tokens_of(30, seed=30)], 5)
    stats = driver.core.stats()
    assert (stats.requests_finished, stats.prompt_tokens, stats.cached_tokens) == (2, 60, 29)
    assert stats.hit_rate == 29 / 60 and stats.queued.count == 2


def test_the_numbers_of_an_idle_engine_are_those_of_its_answers(tiny: Any) -> None:
    driver = Driver(tiny("llama"), tokens=1024, max_rows=2)
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
