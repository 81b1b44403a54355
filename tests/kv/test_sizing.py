"""The arithmetic of KV memory: the published figures reproduce, and sizes read and print as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import (
    KVShape,
    default_kv_bytes,
    default_kv_tokens,
    format_bytes,
    kv_bytes_per_token,
    logits_bytes,
    parse_size,
    shape_bytes,
    shape_bytes_per_token,
    tail_bytes,
    tokens_that_fit,
)


def test_the_published_figures_reproduce() -> None:
    seven_b = kv_bytes_per_token(layers=32, kv_heads=32, k_dim=128) * 8192
    seventy_b = kv_bytes_per_token(layers=80, kv_heads=64, k_dim=128) * 8192
    qwen3_8b = kv_bytes_per_token(layers=36, kv_heads=8, k_dim=128)
    assert (seven_b, format_bytes(seven_b)) == (4_294_967_296, "4 GiB")
    assert (seventy_b, format_bytes(seventy_b)) == (21_474_836_480, "20 GiB")
    assert (qwen3_8b, format_bytes(qwen3_8b)) == (147_456, "144 KiB")
    assert 14 * 2**30 // qwen3_8b == 101_944  # "14 GiB free: about 100k token slots"


def test_keys_and_values_may_differ_in_size() -> None:
    assert kv_bytes_per_token(layers=1, kv_heads=2, k_dim=192, v_dim=128, itemsize=4) == (192 + 128) * 2 * 4
    latent = KVShape(layers=27, kv_heads=1, k_dim=576, v_dim=0)
    assert shape_bytes_per_token([latent]) == 27 * 576 * 2


def test_a_window_bounds_what_a_layer_keeps_and_recurrent_state_does_not_grow() -> None:
    full = KVShape(layers=2, kv_heads=1, k_dim=64, v_dim=64)
    window = KVShape(layers=4, kv_heads=1, k_dim=64, v_dim=64, window=100)
    state = KVShape(layers=3, kv_heads=0, k_dim=0, v_dim=0, row_bytes=5000)
    per_layer_token = 128 * 2
    assert shape_bytes([full, window, state], 1000) == per_layer_token * (2 * 1000 + 4 * 100) + 5000
    assert shape_bytes([full, window, state], 50) == per_layer_token * 6 * 50 + 5000


SHAPES = st.lists(
    st.builds(
        KVShape,
        layers=st.integers(1, 8),
        kv_heads=st.integers(1, 4),
        k_dim=st.sampled_from([64, 128]),
        v_dim=st.sampled_from([0, 64]),
        window=st.none() | st.integers(1, 300),
        row_bytes=st.integers(0, 1000),
    ),
    min_size=1,
    max_size=3,
)


@given(SHAPES, st.integers(0, 10_000_000))
def test_tokens_that_fit_is_the_longest_sequence_within_the_bytes(shapes: list[KVShape], available: int) -> None:
    tokens = tokens_that_fit(shapes, available)
    if tokens is None:
        assert all(s.window is not None for s in shapes)
        assert shape_bytes(shapes, 10**9) <= available
    else:
        assert tokens == 0 or shape_bytes(shapes, tokens) <= available
        assert shape_bytes(shapes, tokens + 1) > available


def test_tail_and_logits_grow_with_active_rows_only() -> None:
    smollm2 = KVShape(layers=30, kv_heads=3, k_dim=64, v_dim=64)
    assert tail_bytes([smollm2], rows=16, itemsize=4) == 2 * 16 * 16 * 30 * 3 * 128 * 4
    assert logits_bytes(rows=16, vocab_size=49152) == 16 * 49152 * 4


def test_default_arena_is_modest() -> None:
    assert default_kv_tokens(context=8192, max_rows=16) == 4 * 8192
    assert default_kv_tokens(context=131072, max_rows=2) == 2 * 32768
    assert default_kv_tokens(context=8192, max_rows=1) == 8192


def test_default_arena_takes_at_most_half_of_what_the_machine_has_left() -> None:
    roomy = default_kv_bytes(147_456, context=40960, max_rows=16, working_set=2**40, reserved=2**34)
    assert roomy == 4 * 32768 * 147_456
    tight = default_kv_bytes(147_456, context=40960, max_rows=16, working_set=12 * 2**30, reserved=8 * 2**30)
    assert tight == 2 * 2**30
    assert default_kv_bytes(147_456, context=40960, max_rows=16, working_set=2**30, reserved=2**31) == 0


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
