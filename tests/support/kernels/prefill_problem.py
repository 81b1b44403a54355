"""Problems for the prefill kernel and their answers in float64: prompts, and pieces of them, laid out in an arena.

Whatever must not be read is poison: dead slots are NaN or infinite, and block table entries of tokens that no query
sees name blocks that do not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.spec import AttentionWindow
from cortexmlx.kv.step import PrefillPiece
from cortexmlx.metal.prefill import PrefillInputs, PrefillKernel, PrefillVariant
from cortexmlx.metal.work import make_prefill_work_list
from support.kernels.paged_problem import NO_BLOCK, NONE, Options, rounded, to_mlx

KV_HEADS = 2


def variant(
    group: int = 2, dim: int = 32, block_size: int = 8, dtype: str = "float32", **changes: Any
) -> PrefillVariant:
    """A small variant; `changes` set further fields."""
    return replace(PrefillVariant(dtype, dtype, dim, dim, block_size, group), **changes)


@dataclass(frozen=True)
class Prompt:
    """What one sequence holds, a query for every token: queries `[query_heads, tokens, key_dim]`, keys and values
    `[kv_heads, tokens, dim]`, float32.
    """

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True)
class Stretch:
    """The tokens `first .. end` of prompt `row`, to be prefilled."""

    row: int
    first: int
    end: int


def random_prompts(v: PrefillVariant, tokens: Sequence[int], seed: int = 0, size: float = 1.0) -> list[Prompt]:
    """Prompts of so many tokens; the numbers of queries and keys are of order `size`."""
    random = np.random.default_rng(seed)

    def draw(dtype: str, scale: float, *shape: int) -> np.ndarray:
        return rounded(scale * random.standard_normal(shape), dtype)

    return [
        Prompt(
            draw(v.dtype, size, KV_HEADS * v.group, n, v.key_dim),
            draw(v.kv_dtype, size, KV_HEADS, n, v.key_dim),
            draw(v.kv_dtype, 1.0, KV_HEADS, n, v.value_dim),
        )
        for n in tokens
    ]


def answer(v: PrefillVariant, prompt: Prompt, first: int, end: int, options: Options = NONE) -> np.ndarray:
    """Attention of the tokens `first .. end` in float64, `[tokens, query_heads, value_dim]`."""
    queries, keys, values = (a.astype(np.float64) for a in (prompt.queries, prompt.keys, prompt.values))
    keys, values = (np.repeat(a[:, :end], v.group, axis=0) for a in (keys, values))
    scores = queries[:, first:end] @ keys.swapaxes(1, 2) * (options.scale or v.key_dim**-0.5)
    if options.softcap is not None:
        scores = options.softcap * np.tanh(scores / options.softcap)
    back = np.arange(first, end)[:, None] - np.arange(end)
    scores = np.where((back >= 0) & (back < (options.window or end)), scores, -np.inf)
    sinks = np.full(len(scores), -np.inf) if options.sinks is None else options.sinks.astype(np.float64)
    top = np.maximum(scores.max(axis=2), sinks[:, None])
    weights = np.exp(scores - top[..., None])
    total = weights.sum(axis=2) + np.exp(sinks[:, None] - top)
    attended: np.ndarray = (weights @ values / total[..., None]).swapaxes(0, 1)
    return attended


def answers(
    v: PrefillVariant, prompts: Sequence[Prompt], stretches: Sequence[Stretch], options: Options = NONE
) -> np.ndarray:
    """The answers of all stretches, one after the other."""
    return np.concatenate([answer(v, prompts[s.row], s.first, s.end, options) for s in stretches])


def attend(
    kernel: PrefillKernel,
    v: PrefillVariant,
    prompts: Sequence[Prompt],
    stretches: Sequence[Stretch],
    options: Options = NONE,
    **places: Any,
) -> np.ndarray:
    """The kernel's result, `[tokens, query_heads, value_dim]` float32. `places` as in `problem`."""
    return np.array(kernel(*problem(v, prompts, stretches, options, **places)).astype(mx.float32))[:, :, 0]


def problem(
    v: PrefillVariant,
    prompts: Sequence[Prompt],
    stretches: Sequence[Stretch],
    options: Options = NONE,
    *,
    runs: bool = False,
    seed: int = 0,
    arena: tuple[Any, Any] | None = None,
    apart: int = 0,
) -> tuple[PrefillVariant, int, PrefillInputs]:
    """What the kernel is called with: variant, items and inputs. The blocks of a stretch's row are scattered, or a run;
    it has those of its own that it sees, up to its end, and what is behind is NaN. After each stretch lie the
    queries of `apart` tokens that are no stretch's, NaN.
    """
    random = np.random.default_rng(seed)
    size, window = v.block_size, options.window
    counts = [-(-s.end // size) for s in stretches]
    spare = sum(counts) + 2
    starts = np.cumsum([1, *counts])
    order = np.arange(spare) if runs else random.permutation(spare)
    keys = np.full((KV_HEADS, spare * size, v.key_dim), np.nan, np.float32)
    values = np.full((KV_HEADS, spare * size, v.value_dim), np.inf, np.float32)
    pieces, queries, begin = [], [], 3  # as behind three rows of single queries
    for s, start, count in zip(stretches, starts, counts, strict=False):
        table, prompt = order[start : start + count], prompts[s.row]
        oldest = 0 if window is None else max(0, s.first + 1 - window)
        position = np.arange(oldest, s.end)
        slots = table[position // size] * size + position % size
        keys[:, slots], values[:, slots] = prompt.keys[:, position], prompt.values[:, position]
        every = np.arange(s.end)
        seen = np.where(every // size < oldest // size, NO_BLOCK, table[every // size])
        run = KVHandle(int(start), count) if runs else None
        piece_slots = None if runs else (seen * size + every % size).astype(np.int32)
        pieces.append(PrefillPiece(begin, begin + s.end - s.first, s.first, run, piece_slots))
        own = prompt.queries[:, s.first : s.end].swapaxes(0, 1)
        queries.append(np.pad(own, ((0, apart), (0, 0), (0, 0)), constant_values=np.nan))
        begin += s.end - s.first + apart
    work = make_prefill_work_list(pieces, size, AttentionWindow(window), v.tile)
    sinks = np.zeros(8) if options.sinks is None else options.sinks
    slabs = arena or (to_mlx(keys, v.kv_dtype), to_mlx(values, v.kv_dtype))
    inputs = PrefillInputs(
        to_mlx(np.ascontiguousarray(np.concatenate(queries)[:, :, None]), v.dtype),
        *slabs,
        mx.array(work.tables),
        mx.array(work.plan),
        mx.array([options.scale or v.key_dim**-0.5, options.softcap or 0.0], mx.float32),
        mx.array(np.pad(sinks, (0, max(0, 8 - len(sinks)))).astype(np.float32)),
    )
    configured = replace(v, softcap=options.softcap is not None, sinks=options.sinks is not None)
    return configured, work.items, inputs
