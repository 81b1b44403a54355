"""Groups of windows: how many blocks a row has, what goes back when, and what a text can begin with then."""

from __future__ import annotations

import pytest

from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.sizing import ArenaDemand, arena_blocks
from cortexmlx.kv.spec import AttentionWindow, KVSpec, LayerGroup
from cortexmlx.scheduling.plan import StepKind
from support.scheduling.stage import Stage

ALL = LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))


def seeing(attention_window: AttentionWindow, layers: int = 1, first: int = 1) -> LayerGroup:
    spec = KVSpec(1, 4, 4, "float32", attention_window.tokens, chunked=attention_window.chunked)
    return LayerGroup(spec, tuple(range(first, first + layers)))


EVERY_ROW = [
    (attention_window, size)
    for attention_window in (AttentionWindow(16), AttentionWindow(40), AttentionWindow(64), AttentionWindow(64, True))
    for size in (16, 32)
]
FEW_ROWS = [(AttentionWindow(16), 16), (AttentionWindow(40), 32)]


@pytest.mark.parametrize(
    ("attention_window", "size"), [r if r in FEW_ROWS else pytest.param(*r, marks=pytest.mark.slow) for r in EVERY_ROW]
)
def test_rows_of_twenty_windows_have_the_blocks_of_one_and_two_more(
    attention_window: AttentionWindow, size: int
) -> None:
    """While they decode; a prompt has those of its piece beside them."""
    window = attention_window.tokens or 0
    stage = Stage(
        [100, 100], size, 1000, groups=[ALL, seeing(attention_window)], context_length=10_000, prefill_budget=48
    )
    jobs = [stage.ask([1, 2, 3] * n, 20 * window) for n in (1, 2 * window)]
    most, whole = 0, 0
    while any(job.finish_reason is None for job in jobs):
        plan = stage.shadow.plan()
        if stage.shadow.in_flight and (plan is None or len(stage.shadow.in_flight) > 1):
            stage.shadow.commit()
        for job in jobs:
            if job.is_running and plan is not None:
                held = len(stage.cache.tables.block_table(job.id, 1))
                extra = -(-48 // size) if plan.kind is StepKind.MIXED else 0
                most = max(most, held - extra)
                whole = max(whole, len(stage.cache.tables.block_table(job.id, 0)))
    assert most <= -(-window // size) + 2
    assert whole >= 20 * window // size
    assert stage.scheduler.preemptions == 0
    stage.finish()


def test_a_model_like_gemma_3_takes_a_quarter_of_full_attentions_arena() -> None:
    """Five layers with a window of a 32nd of the tokens to one that sees all; the arena's own bytes, at its default
    size.
    """
    tokens, load = 16 * 1024, ArenaDemand(rows=16, prefill_budget=128)

    def bytes_at_work(groups: list[LayerGroup]) -> tuple[int, int]:
        limit = arena_blocks(1 << 40, groups, load)
        arena = KVArena(groups, [min(16, n) for n in limit], 32)
        stage = Stage(
            arena.blocks,
            32,
            [min(n, 4096) for n in limit],
            groups=groups,
            context_length=1 << 20,
            prefill_budget=128,
            max_rows=16,
        )
        job = stage.ask([i % 7 for i in range(tokens - 64)], 64)
        used = 0
        while job.finish_reason is None:
            stage.shadow.step()
            if arena.blocks != stage.cache.pools.blocks:
                arena.resize(stage.cache.pools.blocks)
            used = max(used, stage.cache.pools.bytes_in_use)
        return arena.nbytes, used

    mixed, mixed_used = bytes_at_work([ALL, seeing(AttentionWindow(512), 5)])
    full, full_used = bytes_at_work([LayerGroup(ALL.spec, range(6))])
    assert full >= full_used >= 6 * tokens * 8 * 4
    assert mixed <= 0.25 * full and mixed_used <= 0.25 * full_used


def cached(cache: KVCache, tokens: list[int], seq: int = 0, step: int = 4) -> None:
    """A sequence that was computed in steps, passed by windows, and left what it had."""
    keys = cache.prefix.keys(tokens)
    cache.allocate_for(seq, len(tokens), match=cache.match(tokens, keys, len(tokens) - 1))
    while (length := cache.tables.length(seq)) < len(tokens):
        end = min(length + step, len(tokens))
        cache.reserve(seq, end)
        cache.append(seq, end - length)
        cache.register(seq, tokens, end, keys)
    cache.reserve(seq, len(tokens))
    cache.cache_and_free(seq, tokens, len(tokens), keys)
    cache.check_invariants()


def found(cache: KVCache, tokens: list[int]) -> int:
    match = cache.match(tokens, cache.prefix.keys(tokens), len(tokens) - 1)
    return len(match.entries) * cache.block_size + match.partial_tokens


TEXT = list(range(40))


def test_a_prefix_hit_needs_only_the_last_windows_blocks() -> None:
    cache = KVCache(BlockPools([ALL, seeing(AttentionWindow(6))], [20, 6], 4))
    cached(cache, TEXT)
    assert cache.pools[1].allocator.total_blocks == 6 and found(cache, [*TEXT, 99]) == 40
    cache.allocate_for(1, 44, match=cache.match([*TEXT, 99], cache.prefix.keys(TEXT), 40))
    assert (len(cache.tables.block_table(1, 0)), len(cache.tables.block_table(1, 1))) == (11, 3)
    assert cache.tables.table_row(1, 1, 40)[:8].tolist() == [6] * 8, "the null block stands where blocks are gone"
    cache.free(1)


def test_a_text_begins_at_the_last_place_behind_a_whole_window() -> None:
    cache = KVCache(BlockPools([ALL, seeing(AttentionWindow(6))], 40, 4))
    cached(cache, TEXT)
    for _ in range(3):
        assert cache.pools._evict(1)
    lengths = {n: found(cache, [*TEXT[:n], 99]) for n in (4, 8, 12, 16, 20, 40)}
    assert lengths == {4: 0, 8: 0, 12: 0, 16: 0, 20: 20, 40: 40}, "the first three blocks are gone"
    assert found(cache, TEXT[:20]) == 19, "the last token is computed again, in a copy of its block"
    cached(cache, TEXT[:12], 3)
    assert {n: found(cache, [*TEXT[:n], 99]) for n in (12, 16)} == {12: 12, 16: 16}, "new blocks for old entries"


def test_what_windows_have_passed_goes_before_the_cache_grows_and_whole_prefixes_go_last() -> None:
    cache = KVCache(BlockPools([ALL, seeing(AttentionWindow(4))], [20, 7], 4, max_blocks=[40, 40]))
    cached(cache, TEXT)
    assert cache.pools.blocks == (20, 7), "ten blocks went through seven"
    other = [100 + t for t in range(16)]
    cached(cache, other, 1)
    assert cache.pools.blocks == (20, 7)
    assert found(cache, [*TEXT, 99]) == 40 and found(cache, [*other, 99]) == 16


def test_a_chain_without_blocks_leads_on_to_those_that_have_some_and_goes_with_them() -> None:
    cache = KVCache(BlockPools([seeing(AttentionWindow(4))], 6, 4))
    cached(cache, TEXT)
    assert found(cache, [*TEXT, 99]) == 40 and len(cache.prefix) == 10
    assert cache.tables.capacity_tokens > 10**9, "its length costs nothing"
    cache.pools.drop_cached()
    assert len(cache.prefix) == 0 and cache.pools[0].allocator.free_blocks == 6


def test_a_fork_needs_what_its_next_token_sees() -> None:
    cache = KVCache(BlockPools([ALL, seeing(AttentionWindow(6))], 40, 4))
    cache.allocate_for(1, 20)
    cache.append(1, 20)
    assert cache.can_fork(1, 3)
    cache.reserve(1, 24)
    assert cache.can_fork(1, 19) and not cache.can_fork(1, 10)
    assert [copy.group for copy in cache.fork(1, 2, 19)] == [0, 1]
    assert (len(cache.tables.block_table(2, 0)), len(cache.tables.block_table(2, 1))) == (5, 2)
    with pytest.raises(ValueError, match="windows have passed those at 10"):
        cache.fork(1, 3, 10)
    cache.check_invariants()
