"""Any step of paged attention, and its answer in float64 by NumPy, token by token."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
from hypothesis import assume

from cortexmlx.attention.paged import Attend, AttentionParams, PagedKV, paged_attention
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import TAIL_COLUMNS, AttentionWindow, KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep, PrefillPiece

TOLERANCE = {"float32": 2e-5, "float16": 6e-3, "bfloat16": 5e-2}


def softmax_attention(
    q: Any, keys: Any, values: Any, scale: float, sink: float | None, cap: float | None, slope: float = 0.0
) -> Any:
    """One query `[dim]` over keys `[n, dim]` and values `[n, value_dim]`, of which the last is its own, in float64."""
    scores = keys @ q * scale
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    scores = scores + slope * np.arange(1 - len(scores), 1)
    top = max(scores.max(), -np.inf if sink is None else sink)
    weights = np.exp(scores - top)
    total = weights.sum() + (0 if sink is None else np.exp(sink - top))
    return weights @ values / total


class Case:
    """Random rows and pieces on a random arena, poisoned where nothing may be read, for `attend` to compute."""

    def __init__(self, draw: Any, attend: Attend) -> None:
        self.attend = attend
        self.rng = rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        self.block_size = draw(st.sampled_from([8, 16]))
        self.heads, self.group = draw(st.sampled_from([(1, 1), (1, 16), (2, 3), (3, 1), (2, 4)]))
        self.dim, self.value_dim, self.in_key = draw(
            st.sampled_from([(8, 8, False), (16, 8, False), (4, 12, False), (12, 8, True)])
        )
        self.dtype = draw(st.sampled_from(["float32", "float32", "float16", "bfloat16"]))
        self.query_dtype = draw(st.sampled_from([self.dtype, self.dtype, "float32"]))
        self.attention_window = AttentionWindow(draw(st.sampled_from([None, 1, 3, 9, 20, 100])), draw(st.booleans()))
        self.cap = draw(st.sampled_from([None, 2.0]))
        self.scale = draw(st.sampled_from([0.3, 1.0])) if self.dtype == "float32" else 0.1
        self.sinks = self.rounded(rng.normal(size=self.heads * self.group) * 3) if draw(st.booleans()) else None
        slopes = rng.uniform(-0.05, 0.7, self.heads * self.group).astype(np.float32)
        self.slopes = slopes if draw(st.sampled_from([False, False, True])) else None
        self.tail_tokens = draw(st.sampled_from([0, 0, 1, 2, 15, 16]))
        self.decoding = [draw(st.integers(1, 40)) for _ in range(draw(st.integers(0, 4)))]
        shape = st.tuples(st.integers(0, 30), st.integers(2, 20))
        self.prefilling = [] if self.tail_tokens else [draw(shape) for _ in range(draw(st.integers(0, 4)))]
        self.in_runs = draw(st.booleans())
        self.shared = draw(st.booleans())

    def rounded(self, values: Any) -> Any:
        """Float64 numbers as the dtype holds them."""
        return np.array(mx.array(values.astype(np.float32)).astype(getattr(mx, self.dtype)).astype(mx.float32), float)

    def run(self) -> None:
        spec = KVSpec(self.heads, self.dim, self.value_dim, self.dtype, value_in_key=self.in_key)
        size, rng = self.block_size, self.rng
        arena = KVArena([LayerGroup(spec, (0,))], 40, size)
        arena.fill(0, np.arange(40 * size), float("nan"))
        lengths = self.decoding + [first + count for first, count in self.prefilling]
        content, tables, runs = self.fill(arena, lengths)
        rows = len(self.decoding)
        width = max((-(-n // size) for n in self.decoding), default=0)
        padded = np.full((rows, width), arena.null_block(0), np.int32)
        for row in range(rows):
            padded[row, : len(tables[row])] = tables[row]
        pieces, begin = [], rows
        for (first, count), table, run in zip(self.prefilling, tables[rows:], runs[rows:], strict=True):
            slots = (np.array(table)[:, None] * size + np.arange(size)).reshape(-1)[: first + count]
            pieces.append(PrefillPiece(begin, begin + count, first, run, None if run else slots.astype(np.int32)))
            begin += count
        if not begin:
            return
        step = GroupStep(
            padded, np.array(self.decoding, np.int32), tuple(runs[:rows]), tuple(pieces), self.attention_window
        )
        tail, tail_content = self.tail(rows)
        kv = PagedKV(arena, 0, step, tail, self.tail_tokens, getattr(mx, self.dtype), self.attend)
        queries = self.rounded(rng.normal(size=(begin, self.heads * self.group, self.dim)) * 2)
        q = mx.array(queries[:, :, None].astype(np.float32)).astype(getattr(mx, self.query_dtype))
        sinks = None if self.sinks is None else mx.array(self.sinks.astype(np.float32)).astype(kv.dtype)
        slopes = None if self.slopes is None else mx.array(self.slopes)
        found = paged_attention(q, kv, AttentionParams(self.scale, sinks=sinks, softcap=self.cap, slopes=slopes))
        assert found.dtype == q.dtype and found.shape == (begin, self.heads * self.group, 1, self.value_dim)
        result = np.array(found.astype(mx.float32), float)[:, :, 0]
        flat = [(row, n) for row, n in enumerate(self.decoding)]
        for i, (first, count) in enumerate(self.prefilling):
            flat += [(rows + i, first + j + 1) for j in range(count)]
        for token, (row, seen) in enumerate(flat):
            keys, values = (c[:, :seen] for c in content[row])
            if self.tail_tokens:
                keys = np.concatenate([keys, tail_content[0][row]], 1)
                values = np.concatenate([values, tail_content[1][row]], 1)
            if (limit := self.attention_window.tokens) is not None:
                limit = (keys.shape[1] - 1) % limit + 1 if self.attention_window.chunked else limit
                keys, values = keys[:, -limit:], values[:, -limit:]
            for head in range(self.heads * self.group):
                kv_head = head // self.group
                sink = None if self.sinks is None else self.sinks[head]
                slope = 0.0 if self.slopes is None else float(self.slopes[head])
                wanted = softmax_attention(
                    queries[token, head], keys[kv_head], values[kv_head], self.scale, sink, self.cap, slope
                )
                np.testing.assert_allclose(result[token, head], wanted, atol=TOLERANCE[self.dtype])

    def fill(self, arena: KVArena, lengths: list[int]) -> tuple[Any, Any, Any]:
        """Keys and values of every sequence go to its blocks, zeros to the rest of its last one."""
        size, rng = self.block_size, self.rng
        free = list(range(40)) if self.in_runs else rng.permutation(40).tolist()
        content, tables, runs = [], [], []
        for number, length in enumerate(lengths):
            count = -(-length // size)
            assume(count <= len(free))
            table, free = free[:count], free[count:]
            dims = (self.dim, self.value_dim)
            kv = [self.rounded(rng.normal(size=(self.heads, length, d))) for d in dims]
            if self.shared and number and (full := min(length, lengths[0]) // size):
                table[:full] = tables[0][:full]
                for mine, theirs in zip(kv, content[0], strict=True):
                    mine[:, : full * size] = theirs[:, : full * size]
            if self.in_key:
                kv[1] = kv[0][..., : self.value_dim]
            slots = (np.array(table)[:, None] * size + np.arange(size)).reshape(-1)
            padded = [np.pad(a, [(0, 0), (0, len(slots) - length), (0, 0)]) for a in self.stored(kv)]
            arena.write(0, mx.array(slots.astype(np.int32)), *(mx.array(a.astype(np.float32)) for a in padded))
            mx.eval(arena.arrays())
            content.append(kv)
            tables.append(table)
            ascending = table == list(range(table[0], table[0] + count))
            runs.append(KVHandle(table[0], count) if ascending else None)
        return content, tables, runs

    def stored(self, keys_and_values: list[Any]) -> list[Any]:
        """What of them an arena has."""
        return keys_and_values[:1] if self.in_key else keys_and_values

    def tail(self, rows: int) -> tuple[Any, Any]:
        if not self.tail_tokens or not rows:
            self.tail_tokens = 0
            return None, None
        shape = (rows, self.heads, TAIL_COLUMNS)
        full = [self.rounded(self.rng.normal(size=(*shape, d))) for d in (self.dim, self.value_dim)]
        for array in full:
            array[:, :, self.tail_tokens :] = np.nan
        if self.in_key:
            full[1] = full[0][..., : self.value_dim]
        tail = tuple(mx.array(a.astype(np.float32)).astype(getattr(mx, self.dtype)) for a in self.stored(full))
        return tail, [a[:, :, : self.tail_tokens] for a in full]
