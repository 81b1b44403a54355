"""Lists of blocks through `paged_attention`, on the reference path and around the kernels, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.attention import reference
from cortexmlx.attention.metal import MetalAttention
from cortexmlx.attention.paged import AttentionParams, PagedKV, paged_attention
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import AttentionWindow, KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep, restrict_to_blocks
from cortexmlx.metal.lab import sim
from support.kernels.paged_problem import NONE, TOLERANCE, Options, Row, answer, error, random_rows, to_mlx, variant

SIZE, COLUMNS = 8, 16
BACKENDS = {"reference": reference.attend, "kernels": MetalAttention(sim.metal_kernel, check=False).attend}


class Rows:
    """Rows in an arena, each in one run, and their newest tokens in a tail."""

    def __init__(self, dtype: str, tokens: Sequence[int], tail_tokens: int) -> None:
        self.v = variant(group=2, dtype=dtype)
        self.tail_tokens, lengths = tail_tokens, [n - tail_tokens for n in tokens]
        self.rows = random_rows(self.v, tokens)
        spec = KVSpec(2, self.v.key_dim, self.v.value_dim, dtype)
        counts = [-(-n // SIZE) for n in lengths]
        self.arena = KVArena([LayerGroup(spec, (0,))], sum(counts), SIZE)
        tables = np.full((len(tokens), max(counts)), self.arena.null_block(0), np.int32)
        runs, begin = [], 0
        tail = [np.zeros((len(tokens), 2, COLUMNS, dim)) for dim in (self.v.key_dim, self.v.value_dim)]
        for row, (held, length, count) in enumerate(zip(self.rows, lengths, counts, strict=True)):
            tables[row, :count] = begin + np.arange(count)
            runs.append(KVHandle(begin, count))
            place = slice(begin * SIZE, begin * SIZE + length)
            self.arena.write(0, place, *(to_mlx(a[:, :length], dtype) for a in (held.keys, held.values)))
            mx.eval(self.arena.arrays())
            for columns, mine in zip(tail, (held.keys, held.values), strict=True):
                columns[row, :, :tail_tokens] = mine[:, length:]
            begin += count
        self.tail = tuple(to_mlx(a, dtype) for a in tail) if tail_tokens else None
        self.whole = GroupStep(tables, np.array(lengths, np.int32), tuple(runs), (), AttentionWindow())

    def attend(self, backend: Any, step: GroupStep, **options: Any) -> np.ndarray:
        kind = getattr(mx, self.v.dtype)
        kv = PagedKV(self.arena, 0, step, self.tail, self.tail_tokens, kind, backend)
        queries = to_mlx(np.stack([row.query for row in self.rows])[:, :, None], self.v.dtype)
        found = paged_attention(queries, kv, AttentionParams(self.v.key_dim**-0.5, **options))
        return np.array(found.astype(mx.float32))[:, :, 0]

    def listed(self, lists: Sequence[Sequence[int]]) -> GroupStep:
        places = [np.array(mine, np.int32) for mine in lists]
        return restrict_to_blocks(self.whole, places, SIZE, self.arena.null_block(0))

    def kept(self, lists: Sequence[Sequence[int]]) -> list[Row]:
        """Rows that have the listed tokens and no others."""
        short = []
        for row, places, length in zip(self.rows, lists, self.whole.lengths, strict=True):
            position = np.array([t for t in range(row.tokens) if t >= length or t // SIZE in places], int)
            short.append(Row(row.query, row.keys[:, position], row.values[:, position]))
        return short


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("tokens", "tail_tokens", "lists"),
    [
        ([44, 70, 12, 305], 4, [[0, 4], [8], [], [0, 1, 35, 36, 37]]),
        ([40, 71], 0, [[0, 2], [8]]),
        ([100], 3, [[0, 11, 12]]),
    ],
    ids=["batch", "no tail", "alone in a run"],
)
def test_rows_attend_to_their_listed_blocks(
    backend: str, dtype: str, tokens: list[int], tail_tokens: int, lists: list[list[int]]
) -> None:
    case = Rows(dtype, tokens, tail_tokens)
    sinks = np.linspace(-1.0, 3.0, 4).astype(np.float32)
    for options, given in ((NONE, {}), (Options(sinks=sinks, softcap=3.0), {"sinks": mx.array(sinks), "softcap": 3.0})):
        got = case.attend(BACKENDS[backend], case.listed(lists), **given)
        limit = TOLERANCE["float32"] if dtype == "float32" else 6e-3
        assert error(got, answer(case.v, case.kept(lists), options)) < limit


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [[44, 70, 12], [100]], ids=["batch", "alone in a run"])
def test_a_list_of_all_blocks_changes_no_bit(backend: str, tokens: list[int]) -> None:
    case = Rows("float32", tokens, 4)
    step = case.listed([range(-(-int(n) // SIZE)) for n in case.whole.lengths])
    assert np.array_equal(case.attend(BACKENDS[backend], step), case.attend(BACKENDS[backend], case.whole))
