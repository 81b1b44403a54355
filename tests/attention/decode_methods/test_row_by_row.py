"""A row's attention has the same bits alone and in any batch, wherever the boundary between arena and tail lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.attention import decode_methods
from cortexmlx.attention.decode_methods import ReferenceAttention
from cortexmlx.attention.paged import AttentionParams, PagedKV
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import TAIL_COLUMNS, AttentionWindow, KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep
from support.effort import examples

BLOCK, HEADS, GROUP, DIM = 8, 2, 3, 32


@dataclass(frozen=True)
class Row:
    """A row's query `[heads, dim]`, keys and values `[kv_heads, tokens, dim]`."""

    query: Any
    keys: Any
    values: Any


def row_of(tokens: int, seed: int) -> Row:
    rng = np.random.default_rng(seed)
    shapes = ((HEADS * GROUP, DIM), (HEADS, tokens, DIM), (HEADS, tokens, DIM))
    return Row(*(rng.normal(size=shape).astype(np.float32) for shape in shapes))


def attended(
    rows: list[Row],
    tail: int,
    window: AttentionWindow,
    scattered: bool,
    attend: Any,
    dtype: str = "float32",
    **more: Any,
) -> list[Any]:
    """The attention of each row, with the newest `tail` tokens of all in the tail."""
    kind = getattr(mx, dtype)
    counts = [-(-(row.keys.shape[1] - tail) // BLOCK) for row in rows]
    order = np.random.default_rng(len(rows)).permutation(sum(counts)) if scattered else np.arange(sum(counts))
    form = more.pop("form", {})
    arena = KVArena([LayerGroup(KVSpec(HEADS, DIM, DIM, dtype, **form), (0,))], max(sum(counts), 1), BLOCK)
    quantization = arena.quantization(0)
    pack = (lambda *a: a) if quantization is None else quantization.quantize
    tables = np.full((len(rows), max([1, *counts])), arena.null_block(0), np.int32)
    tails, begin = [], 0
    for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
        tables[number, :count] = order[begin : begin + count]
        length = row.keys.shape[1] - tail
        position = np.arange(length)
        slots = tables[number, position // BLOCK] * BLOCK + position % BLOCK
        plain = [mx.array(a).astype(kind) for a in (row.keys, row.values)]
        if length:
            arena.write(0, mx.array(slots.astype(np.int32)), *pack(*(a[:, :length] for a in plain)))
        padding = [(0, 0), (0, TAIL_COLUMNS - tail), (0, 0)]
        tails.append(pack(*(mx.pad(a[:, length:], padding) for a in plain)))
        mx.eval(arena.arrays())
        begin += count
    runs = tuple(None if scattered else KVHandle(int(t[0]), count) for t, count in zip(tables, counts, strict=True))
    lengths = np.array([row.keys.shape[1] - tail for row in rows], np.int32)
    step = GroupStep(tables, lengths, runs, (), window)
    newest = tuple(mx.stack(list(each)) for each in zip(*tails, strict=True)) if tail else None
    kv = PagedKV(arena, 0, step, newest, tail, kind, attend, quantization=quantization)
    queries = mx.array(np.stack([row.query for row in rows]))[:, :, None].astype(kind)
    out = attend(queries, kv, AttentionParams(0.25, **more))
    return [np.array(out[number].astype(mx.float32)) for number in range(len(rows))]


WINDOWS = [AttentionWindow(), AttentionWindow(20), AttentionWindow(5), AttentionWindow(16, chunked=True)]


@given(st.data())
@settings(max_examples=examples(30))
def test_the_same_bits_alone_and_in_any_batch(data: st.DataObject) -> None:
    draw = data.draw
    rows = [row_of(n, seed) for seed, n in enumerate(draw(st.lists(st.integers(16, 90), min_size=2, max_size=5)))]
    window, scattered = draw(st.sampled_from(WINDOWS)), draw(st.booleans())
    more: dict[str, Any] = {}
    if draw(st.booleans()):
        more["sinks"] = mx.array(np.linspace(-1, 3, HEADS * GROUP).astype(np.float32))
    if draw(st.booleans()):
        more["softcap"] = 2.0
    if draw(st.booleans()):
        more["slopes"] = mx.array(np.linspace(0.01, 0.5, HEADS * GROUP).astype(np.float32))
    together = attended(rows, draw(st.integers(0, 16)), window, scattered, decode_methods.attend_row_by_row, **more)
    for row, result in zip(rows, together, strict=True):
        [alone] = attended(
            [row], draw(st.integers(0, 16)), window, draw(st.booleans()), decode_methods.attend_row_by_row, **more
        )
        assert np.array_equal(alone, result)


@pytest.mark.parametrize(
    ("dtype", "form"),
    [("float32", {}), ("float16", {}), ("bfloat16", {}), ("float32", {"kv_bits": 8, "kv_group_size": 32})],
)
def test_a_reproducible_reference_backend(dtype: str, form: dict[str, int]) -> None:
    """Plain and quantized, on a CPU below float32 too."""
    backend = ReferenceAttention()
    backend.choices.reproducible = True
    rows = [row_of(n, n) for n in (70, 33, 18, 41)]
    for tail in (0, 3, 16):
        together = attended(rows, tail, AttentionWindow(), True, backend.attend, dtype, form=form)
        for row, result in zip(rows, together, strict=True):
            [alone] = attended([row], 0, AttentionWindow(), False, backend.attend, dtype, form=form)
            assert np.array_equal(alone, result)
