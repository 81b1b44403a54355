"""The arithmetic of KV memory: the published figures reproduce, and sizes read and print as people write them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.sizing import (
    ArenaDemand,
    arena_blocks,
    blocks_that_fit,
    bytes_per_token,
    check_kv_memory,
    default_kv_bytes,
    default_kv_tokens,
    format_bytes,
    kv_memory_warning,
    logits_bytes,
    max_long_tail_rows,
    max_row_blocks,
    parse_size,
    row_kv_bytes,
    row_state_bytes,
    sequence_bytes,
    split_memory,
    step_state_bytes,
    tail_bytes,
    tokens_that_fit,
)
from cortexmlx.kv.spec import BLOCK_SIZES, TAIL_COLUMNS, AttentionWindow, KVSpec, LayerGroup


def group(layers: int, kv_heads: int, key: int, value: int, window: int | None = None, state: int = 0) -> LayerGroup:
    return LayerGroup(KVSpec(kv_heads, key, value, "float16", window, state), range(layers))


def test_the_published_figures_reproduce() -> None:
    seven_b = bytes_per_token([group(32, 32, 128, 128)]) * 8192
    seventy_b = bytes_per_token([group(80, 64, 128, 128)]) * 8192
    qwen3_8b = bytes_per_token([group(36, 8, 128, 128)])
    assert (seven_b, format_bytes(seven_b)) == (4_294_967_296, "4 GiB")
    assert (seventy_b, format_bytes(seventy_b)) == (21_474_836_480, "20 GiB")
    assert (qwen3_8b, format_bytes(qwen3_8b)) == (147_456, "144 KiB")
    assert 14 * 2**30 // qwen3_8b == 101_944  # "14 GiB free: about 100k token slots"


def test_keys_and_values_may_differ_in_size_and_numbers_in_bytes() -> None:
    assert bytes_per_token([group(1, 2, 192, 128)], itemsize=4) == (192 + 128) * 2 * 4
    assert bytes_per_token([group(27, 1, 576, 0)]) == 27 * 576 * 2
    wide = LayerGroup(KVSpec(1, 10, 10, "float32"), (0,))
    assert bytes_per_token([wide, group(1, 1, 10, 10)]) == 20 * 4 + 20 * 2
    assert bytes_per_token([wide, group(1, 1, 10, 10)], itemsize=1) == 40


def test_a_window_bounds_what_a_layer_keeps_and_recurrent_state_does_not_grow() -> None:
    groups = [group(2, 1, 64, 64), group(4, 1, 64, 64, window=100), group(3, 0, 0, 0, state=5000)]
    per_layer_token = 128 * 2
    assert row_state_bytes(groups) == 3 * 5000
    assert sequence_bytes(groups, 1000) == per_layer_token * (2 * 1000 + 4 * 100) + 3 * 5000
    assert sequence_bytes(groups, 50) == per_layer_token * 6 * 50 + 3 * 5000


GROUPS = st.lists(
    st.builds(
        group,
        layers=st.integers(1, 8),
        kv_heads=st.integers(1, 4),
        key=st.sampled_from([64, 128]),
        value=st.sampled_from([0, 64]),
        window=st.none() | st.integers(1, 300),
        state=st.integers(0, 1000),
    ),
    min_size=1,
    max_size=3,
)


@given(GROUPS, st.integers(0, 10_000_000))
def test_tokens_that_fit_is_the_longest_sequence_within_the_bytes(groups: list[LayerGroup], available: int) -> None:
    tokens = tokens_that_fit(groups, available)
    if tokens is None:
        assert all(g.spec.window is not None for g in groups)
        assert sequence_bytes(groups, 10**9) <= available
    else:
        assert tokens == 0 or sequence_bytes(groups, tokens) <= available
        assert sequence_bytes(groups, tokens + 1) > available


def test_tail_and_logits_grow_with_active_rows_only() -> None:
    smollm2 = group(30, 3, 64, 64)
    assert tail_bytes([smollm2], rows=16, itemsize=4) == 2 * 16 * 16 * 30 * 3 * 128 * 4
    assert logits_bytes(rows=16, vocab_size=49152) == 16 * 49152 * 4


def test_default_arena_is_modest() -> None:
    assert default_kv_tokens(context=8192, max_rows=16) == 4 * 8192
    assert default_kv_tokens(context=131072, max_rows=2) == 2 * 32768
    assert default_kv_tokens(context=8192, max_rows=1) == 8192


def test_default_arena_takes_at_most_half_of_what_the_machine_has_left() -> None:
    full, load = [group(36, 8, 128, 128)], ArenaDemand(rows=16, prefill_budget=512)
    assert bytes_per_token(full) == 147_456
    assert default_kv_bytes(full, load, 40960, working_set=2**40, occupied_bytes=2**34) == 4 * 32768 * 147_456
    assert default_kv_bytes(full, load, 40960, working_set=12 * 2**30, occupied_bytes=8 * 2**30) == 2 * 2**30
    assert default_kv_bytes(full, load, 40960, working_set=2**30, occupied_bytes=2**31) == 0
    few = default_kv_bytes(full, load, 2, working_set=2**40, occupied_bytes=0)
    assert few == 4 * load.block_size * 147_456, "rows of two tokens have whole blocks, too"
    assert default_kv_bytes(full, load, 40960, working_set=2**40, occupied_bytes=0, itemsize=1) == 2 * 32768 * 147_456


@given(st.integers(1, 300), st.booleans(), st.sampled_from(BLOCK_SIZES))
def test_a_decoding_row_of_a_window_has_at_most_the_blocks_that_the_worst_place_of_it_touches(
    window: int, chunked: bool, size: int
) -> None:
    """Between two flushes: the oldest token that the first step sees, up to the last column of the tail."""
    attention_window = AttentionWindow(window, chunked)
    worst = max(
        (p + TAIL_COLUMNS - 1) // size - attention_window.oldest_visible(p) // size + 1
        for p in range(2 * window + 2 * size)
    )
    most = max_row_blocks(attention_window, size)
    assert most is not None and worst <= most
    if not chunked:
        assert worst == most
    if size >= 16:
        assert most <= -(-window // size) + 2
    assert max_row_blocks(AttentionWindow(), size) is None


WINDOWS = st.lists(st.sampled_from([None, None, 16, 100, 1024]), min_size=1, max_size=4)


@given(WINDOWS, st.integers(10**4, 10**8), st.integers(1, 16), st.sampled_from([512, 2048]))
def test_an_arena_is_shared_out_evenly_up_to_what_a_window_can_use(
    windows: list[int | None], memory: int, rows: int, piece: int
) -> None:
    groups = [group(i + 1, 1, 8, 8, window=window) for i, window in enumerate(windows)]
    load = ArenaDemand(rows, 512, lone_prefill_budget=piece if piece > 512 else 0)
    blocks = blocks_that_fit(memory, groups, load)

    def size(each: Sequence[int]) -> int:
        return sum(g.bytes_per_token * 32 * n for g, n in zip(groups, each, strict=True))

    assert size(blocks) <= memory
    limits, more = ([each(g) for g in groups] for each in (load.max_useful_blocks, load.extra_point_blocks))
    pairs = list(zip(blocks, limits, more, strict=True))
    assert all(min(max(blocks), limit - few) <= count <= min(max(blocks), limit) for count, limit, few in pairs)
    kept = size([max(0, count - limit + few) for count, limit, few in pairs])
    assert kept <= memory // 4, "what few rows have for resume points"
    if max(blocks) < max(limits):
        assert size([n + (n < limit) for n, limit in zip(blocks, limits, strict=True)]) > memory or kept
    for window, g in zip(windows, groups, strict=True):
        if window is not None:
            at_once = rows * -(-window // 32) + piece // 32
            assert at_once <= load.max_useful_blocks(g) - load.extra_point_blocks(g) <= 2 * at_once + 7 * rows
            assert load.extra_point_blocks(g) <= max(0, 12 - rows) * (-(-window // 32) + 2)


def test_an_arena_without_a_block_is_refused_with_what_it_needs() -> None:
    with pytest.raises(InvalidRequest, match="of 1000 B holds no block of 32 tokens: give it at least 2 KiB"):
        arena_blocks(1000, [group(1, 1, 16, 16)], ArenaDemand(4, 512))
    assert arena_blocks(2048, [group(1, 1, 16, 16)], ArenaDemand(4, 512)) == (1,)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GB", 4_000_000_000),
        ("4 gib", 4 * 2**30),
        ("4G", 4 * 2**30),
        ("512MB", 512_000_000),
        ("1.5GiB", 3 * 2**29),
        (".5k", 512),
        ("1048576", 2**20),
        (4096, 4096),
        ("17b", 17),
    ],
)
def test_parse_size_reads_what_people_write(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "4XB", "-1GB", "four", "4 GB GB", "0", "0.1b", "1e9"])
def test_parse_size_refuses_the_rest_and_says_how_to_write_it(text: str) -> None:
    with pytest.raises(InvalidRequest, match="write 4GB, 512MB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (22_500, "22 KiB"),
        (1.25 * 2**30, "1.25 GiB"),
        (98_000_000, "93.5 MiB"),
        (1000 * 2**20, "1000 MiB"),
        (5 * 2**50, "5120 TiB"),
    ],
)
def test_format_bytes_is_short(size: float, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(1, 2**50))
def test_a_printed_size_reads_back_within_its_rounding(size: int) -> None:
    assert parse_size(format_bytes(size)) == pytest.approx(size, rel=0.01)


def test_snapshots_of_states_get_a_quarter_of_the_memory_at_most() -> None:
    attention = LayerGroup(KVSpec(2, 8, 8, "float32"), (0, 2))
    recurrent = LayerGroup(KVSpec(0, 0, 0, "float32", row_bytes=500), (1, 3))
    hybrid = (attention, recurrent)
    assert step_state_bytes(hybrid, 4) == 2 * 4 * 1000 and step_state_bytes([attention], 4) == 0
    assert split_memory(hybrid, 100_000, 8) == (75_000, 25)
    assert split_memory(hybrid, 10**6, 8) == (10**6 - 32_000, 32), "four for each row"
    assert split_memory(hybrid, 3_999, 8) == (3_999, 0), "none rather than no blocks"
    assert split_memory([attention], 3_999, 8) == (3_999, 0)
    assert split_memory([recurrent], 9_500, 8) == (500, 9), "all of it where tokens take none"
    load = ArenaDemand(rows=2, prefill_budget=64, block_size=8)
    without = default_kv_bytes([attention], load, 1000, 2**40, 0)
    assert default_kv_bytes(hybrid, load, 1000, 2**40, 0) == without + 12 * 1000, "at least twelve"


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_running_row_takes_whole_blocks_and_of_a_window_as_many_as_a_cache_gives_it(block_size: int) -> None:
    """A row that decodes window by window in a cache, which is asked at each step."""
    window, tokens = 100, 700
    groups = (LayerGroup(KVSpec(1, 4, 4, "float32"), (0,)), LayerGroup(KVSpec(1, 4, 4, "float32", window), (1, 2)))
    cache = KVCache(BlockPools(groups, 1_000, block_size))
    cache.allocate_for(0, 1)
    cache.append(0, 1)
    most = 0
    while cache.tables.length(0) < tokens:
        cache.reserve(0, min(cache.tables.length(0) + TAIL_COLUMNS, tokens))
        most = max(most, cache.pools.bytes_in_use)
        for _ in range(min(TAIL_COLUMNS, tokens - cache.tables.length(0))):
            cache.append(0, 1)
    said = row_kv_bytes(groups, tokens, block_size)
    assert said - 2 * block_size * groups[1].bytes_per_token <= most <= said
    assert said >= sequence_bytes(groups, tokens)


def test_more_kv_memory_than_the_machine_has_is_refused_and_more_than_is_left_is_mentioned() -> None:
    check_kv_memory(16 * 2**30, 16 * 2**30, 12 * 2**30)
    with pytest.raises(InvalidRequest, match=r"of 16\.1 GiB is more than this machine has: 16 GiB, 12 GiB of it for"):
        check_kv_memory(161 * 2**30 // 10, 16 * 2**30, 12 * 2**30)
    assert kv_memory_warning(2**30, 2**30) == ()
    (note,) = kv_memory_warning(2**30 + 2**20 * 10, 2**30)
    assert "may grow to 1.01 GiB" in note and "has 1 GiB for it" in note


def test_a_tail_is_long_where_its_copies_cost_less_than_the_flushes_that_it_saves() -> None:
    """Qwen3-0.6B: 28 layers, 8 KV heads of 128. In bfloat16 1.2 GB of weights are read in a step, 0.34 GB in 4 bits."""
    qwen = LayerGroup(KVSpec(8, 128, 128, "bfloat16"), tuple(range(28)))
    copied = 2 * 48 * bytes_per_token([qwen])
    assert copied == 11_010_048
    for weights, rows in ((1_192_000_000, 2), (335_000_000, 1), (200_000_000, 0)):
        assert max_long_tail_rows([qwen], weights) == rows
        saved = weights / 16 - weights / 64
        assert rows * copied <= saved and (rows == 2 or (rows + 1) * copied > saved)
    windowed = LayerGroup(KVSpec(8, 128, 128, "bfloat16", window=1024), (28,))
    assert max_long_tail_rows([qwen, windowed], 1_192_000_000) == 0
    assert max_long_tail_rows([LayerGroup(KVSpec(0, 0, 0, "float32"), ())], 1_192_000_000) == 0


def test_the_memory_of_a_long_tail_is_reserved() -> None:
    group = LayerGroup(KVSpec(8, 128, 128, "bfloat16"), (0,))
    token = 2 * bytes_per_token([group])
    for rows, tokens in ((1, 64), (2, 128), (4, 128), (8, 128), (9, 144)):
        assert tail_bytes([group], rows, long_tail_rows=2) == token * tokens
    assert tail_bytes([group], 2, long_tail_rows=1) == token * 64
