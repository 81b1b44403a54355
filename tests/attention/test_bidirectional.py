"""Pieces whose tokens see each other both ways, those of an image: what float64 NumPy says, in every backend, beside
pieces that see only what is before them.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.attention import reference
from cortexmlx.attention.metal import MetalAttention
from cortexmlx.attention.paged import AttentionParams, PagedKV, StepDerivedData
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import AttentionWindow, KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep, PrefillPiece
from cortexmlx.metal.lab import sim

BLOCK, DIM, HEADS, KV_HEADS = 8, 64, 4, 2
LONG, MIDDLE, SHORT = KVHandle(1, 20), KVHandle(22, 3), np.array([[39], [30]]) * BLOCK + np.arange(BLOCK)
PIECES = (
    PrefillPiece(2, 9, 0, LONG, None),  # a text, its image of 140 tokens in three chunks, and the text after it
    PrefillPiece(9, 149, 7, LONG, None, True),
    PrefillPiece(149, 152, 147, LONG, None),
    PrefillPiece(152, 155, 17, MIDDLE, None, True),  # the rest of an image that began in the cache
    PrefillPiece(155, 158, 20, MIDDLE, None),
    PrefillPiece(158, 170, 0, None, SHORT.reshape(-1)[:12].astype(np.int32), True),
)


def problem(window: int | None, bits: int | None = None) -> tuple[PagedKV, mx.array]:
    random = np.random.default_rng(5)
    spec = KVSpec(KV_HEADS, DIM, DIM, "float32", kv_bits=bits, kv_group_size=None if bits is None else 32)
    arena = KVArena([LayerGroup(spec, (0,))], 40, BLOCK)
    new = [mx.array(random.standard_normal((KV_HEADS, 40 * BLOCK, DIM), np.float32)) for _ in range(2)]
    stored = new if bits is None else arena.quantization(0).quantize(*new)  # type: ignore[union-attr]
    for slab, values in zip(arena.slab(0), stored, strict=True):
        slab[:, : 40 * BLOCK] = values
    tables = np.array([[34, 35, 36], [37, 0, 0]], np.int32)
    step = GroupStep(tables, np.array([18, 8], np.int32), (None, None), PIECES, AttentionWindow(window))
    queries = mx.array(random.standard_normal((PIECES[-1].end, HEADS, 1, DIM), np.float32))
    derived = StepDerivedData()
    return PagedKV(arena, 0, step, None, 0, mx.float32, reference.attend, derived, arena.quantization(0)), queries


def judge(kv: PagedKV, queries: mx.array) -> np.ndarray:
    slab = kv.arena.slab(0)
    plain = slab if kv.quantization is None else kv.quantization.dequantize(slab)
    keys, values = (np.array(array).astype(np.float64) for array in plain)
    window, out = kv.step.attention_window.tokens or 10**6, []
    rows = [
        (r * BLOCK + np.arange(BLOCK)[None, :]).reshape(-1) for r in (np.array([[34], [35], [36]]), np.array([[37]]))
    ]
    seen = [(rows[0][:18], 17, 17), (rows[1][:8], 7, 7)]
    for piece in PIECES:
        slots = piece.slots if piece.run is None else piece.run.start * BLOCK + np.arange(piece.tokens)
        for position in range(piece.first, piece.tokens):
            seen.append((slots, position, piece.tokens - 1 if piece.bidirectional else position))
    for query, (slots, position, newest) in zip(np.array(queries)[:, :, 0].astype(np.float64), seen, strict=True):
        own = slots[max(position - window + 1, 0) : newest + 1]
        for head in range(HEADS):
            scores = keys[head // 2, own] @ query[head] * 0.125
            weights = np.exp(scores - scores.max())
            out.append(weights / weights.sum() @ values[head // 2, own])
    return np.array(out).reshape(len(seen), HEADS, 1, DIM)


@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("bits", [None, 8])
def test_an_image_sees_itself_and_no_text_sees_it_early(window: int | None, bits: int | None) -> None:
    kv, queries = problem(window, bits)
    assert np.abs(np.array(reference.attend(queries, kv, AttentionParams(0.125))) - judge(kv, queries)).max() < 1e-5
    kv.derived, coarse = StepDerivedData(), queries.astype(mx.bfloat16)  # a CPU takes MLX's own attention then
    out = np.array(reference.attend(coarse, kv, AttentionParams(0.125)).astype(mx.float32))
    assert np.abs(out - judge(kv, coarse.astype(mx.float32))).max() < 0.03


@pytest.mark.lab
@pytest.mark.parametrize("matrix_units", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_kernels_leave_images_to_mlx(window: int | None, matrix_units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, queries = problem(window)
    kernels: Any = MetalAttention(sim.metal_kernel, check=False, matrix_units=matrix_units)
    for by_kernel in (True, False):
        monkeypatch.setattr(kernels.prefill, "is_preferred", lambda *_, by_kernel=by_kernel: by_kernel)
        kv.derived = StepDerivedData()
        assert np.abs(np.array(kernels.attend(queries, kv, AttentionParams(0.125))) - judge(kv, queries)).max() < 1e-4
    assert kernels.notes() == () and kernels.prefill.has_served
