"""The reference backend on quantized keys and values, against attention in float64 over what their codes stand for."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.attention import reference
from cortexmlx.attention.metal import MetalAttention
from cortexmlx.attention.paged import AttentionParams, PagedKV
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import KVArena, Quantization, Slab
from cortexmlx.kv.spec import TAIL_COLUMNS, AttentionWindow, KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep, PrefillPiece
from cortexmlx.metal.lab import sim
from support.kernels.quantized_problem import dequantize

BLOCK, BLOCKS, HEADS, GROUP, DIM = 8, 24, 2, 3, 64
TOLERANCE = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2}


class _Arena(KVArena):
    """An arena whose one layer has a slab that is given."""

    def __init__(self, slab: Slab, dtype: str, form: Quantization) -> None:
        spec = KVSpec(HEADS, DIM, DIM, dtype, kv_bits=form.bits, kv_group_size=form.group)
        super().__init__([LayerGroup(spec, (0,))], BLOCKS, BLOCK)
        self._slabs[0] = slab


def _attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, cap: float | None) -> np.ndarray:
    """One query per head `[query_heads, dim]` over keys and values `[kv_heads, tokens, dim]`."""
    out = []
    for head, query in enumerate(q.astype(np.float64)):
        scores = keys[head // GROUP] @ query * scale
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max())
        out.append(weights @ values[head // GROUP] / weights.sum())
    return np.stack(out)


class _Problem:
    """Two rows in scattered blocks with a tail, and a prefill piece; what belongs to none of them is NaN."""

    def __init__(self, form: Quantization, dtype: str, window: int | None, *, run: bool) -> None:
        self.form, self.window, self.scale = form, window, 0.125
        random, self.dtype = np.random.default_rng(3), getattr(mx, dtype)
        slots = (BLOCKS + 2) * BLOCK

        def draw(*shape: int) -> mx.array:
            return mx.array(random.standard_normal(shape).astype(np.float32)).astype(self.dtype)

        slab = list(form.quantize(draw(HEADS, slots, DIM), draw(HEADS, slots, DIM)))
        tail = list(form.quantize(draw(2, HEADS, TAIL_COLUMNS, DIM), draw(2, HEADS, TAIL_COLUMNS, DIM)))
        self.tables = [[7, 2, 19], [5]]
        self.lengths, self.tail_tokens = [19, 8], 0 if run else 5
        piece = np.arange(8 * 10, 8 * 12 + 4) if run else np.array([*range(8, 16), *range(24, 32), *range(88, 92)])
        used = np.concatenate([np.array(b) * BLOCK + i for b in (7, 2, 19, 5) for i in range(BLOCK)], axis=None)
        unused = np.setdiff1d(np.arange(slots), np.concatenate([used, piece]))
        rest = np.arange(piece[-1] + 1, (piece[-1] // BLOCK + 1) * BLOCK)
        dead = np.array([19 * BLOCK + i for i in range(3, BLOCK)] + rest.tolist())  # after last tokens: zeroed
        for i in (1, 2, 4, 5):
            slab[i][:, mx.array(unused)] = float("nan")
            slab[i][:, mx.array(dead)] = 0
            tail[i][:, :, self.tail_tokens :] = float("nan")
        self.slab, self.tail, self.piece = slab, tail, piece
        rows = 2
        table = np.full((rows, 3), BLOCKS, np.int32)
        for i in (1, 2, 4, 5):
            slab[i][:, BLOCKS * BLOCK : (BLOCKS + 1) * BLOCK] = 0  # the null block
        for row, blocks in enumerate(self.tables):
            table[row, : len(blocks)] = blocks
        handle = KVHandle(10, 3) if run else None
        pieces = (PrefillPiece(rows, rows + 6, len(piece) - 6, handle, None if run else piece.astype(np.int32)),)
        step = GroupStep(table, np.array(self.lengths, np.int32), (None, None), pieces, AttentionWindow(window))
        mx.eval(slab, tail)
        self.queries = draw(rows + 6, HEADS * GROUP, 1, DIM)
        self.kv = PagedKV(
            _Arena(tuple(slab), dtype, form),
            0,
            step,
            tuple(tail) if self.tail_tokens else None,
            self.tail_tokens,
            self.dtype,
            reference.attend,
            quantization=form,
        )

    def wanted(self, cap: float | None) -> np.ndarray:
        every = (self.slab[:3], self.slab[3:], self.tail[:3], self.tail[3:])
        keys, values, tail_keys, tail_values = (dequantize(self.form.bits, self.form.group, parts) for parts in every)
        queries = np.array(self.queries.astype(mx.float32))[:, :, 0]
        out, n = [], self.tail_tokens
        for row, (blocks, length) in enumerate(zip(self.tables, self.lengths, strict=True)):
            slots = np.concatenate([np.arange(b * BLOCK, (b + 1) * BLOCK) for b in blocks])[:length]
            k = np.concatenate([keys[:, slots], tail_keys[row, :, :n]], axis=1)
            v = np.concatenate([values[:, slots], tail_values[row, :, :n]], axis=1)
            first = 0 if self.window is None else max(0, k.shape[1] - self.window)
            out.append(_attention(queries[row], k[:, first:], v[:, first:], self.scale, cap))
        for i in range(6):
            seen = self.piece[: len(self.piece) - 5 + i]
            seen = seen if self.window is None else seen[-self.window :]
            out.append(_attention(queries[2 + i], keys[:, seen], values[:, seen], self.scale, cap))
        return np.stack(out)


@pytest.fixture(params=["by codes", "gathered"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows as on a CPU, and as on a GPU."""
    monkeypatch.setattr("cortexmlx.attention.reference.multiplies_quantized", lambda: request.param == "by codes")


@pytest.mark.parametrize(
    ("dtype", "bits", "of", "window"),
    [
        ("float32", 8, 64, None),
        ("float32", 4, 32, 7),
        ("float32", 8, 32, 7),
        ("float32", 4, 64, None),
        ("float16", 4, 32, None),
        ("bfloat16", 8, 64, 7),
    ],
)
@pytest.mark.usefixtures("way")
def test_rows_tails_and_pieces_are_attention_over_what_codes_stand_for(
    dtype: str, bits: int, of: int, window: int | None
) -> None:
    for run in (False, True):
        for cap in (None, 2.0):
            problem = _Problem(Quantization(bits, of), dtype, window, run=run)
            got = reference.attend(problem.queries, problem.kv, AttentionParams(problem.scale, softcap=cap))
            assert got.dtype == problem.dtype
            difference = np.abs(np.array(got.astype(mx.float32))[:, :, 0] - problem.wanted(cap)).max()
            assert difference < TOLERANCE[dtype]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_lone_row_in_a_run_is_what_its_codes_stand_for(dtype: str) -> None:
    """Of plain numbers such a row is read as a view of its run."""
    problem = _Problem(Quantization(4, 32), dtype, None, run=True)
    whole = problem.kv.step
    problem.kv.step = GroupStep(whole.tables[1:], whole.lengths[1:], (KVHandle(5, 1),), (), AttentionWindow())
    got = np.array(
        reference.attend(problem.queries[1:2], problem.kv, AttentionParams(problem.scale)).astype(mx.float32)
    )
    assert np.abs(got[0, :, 0] - problem.wanted(None)[1]).max() < TOLERANCE[dtype]


@pytest.mark.lab
@pytest.mark.parametrize("bits", [8, 4])
def test_the_metal_backend_gives_rows_to_a_kernel_and_leaves_it_the_pieces(bits: int) -> None:
    for window, run in ((None, False), (7, False), (None, True)):
        attention = MetalAttention(sim.metal_kernel, check=False)
        problem = _Problem(Quantization(bits, 32), "float32", window, run=run)
        got = np.array(attention.attend(problem.queries, problem.kv, AttentionParams(problem.scale)))[:, :, 0]
        assert np.abs(got - problem.wanted(None)).max() < TOLERANCE["float32"]
        assert attention.used_kernels() == ("matrix",)
        assert len(attention.notes()) == (window is not None)  # only of windows there would be a kernel for pieces


@pytest.mark.lab
def test_a_step_of_codes_and_one_of_numbers_have_variants_of_their_own() -> None:
    """Codes are words of 32 bits: to a kernel of plain numbers they would be such."""
    attention = MetalAttention(sim.metal_kernel, check=False)
    for form in (Quantization(8, 64), Quantization(4, 64), Quantization(4, 32)):
        problem = _Problem(form, "float32", None, run=False)
        got = np.array(attention.attend(problem.queries, problem.kv, AttentionParams(problem.scale)))[:, :, 0]
        assert np.abs(got - problem.wanted(None)).max() < TOLERANCE["float32"]


@pytest.mark.usefixtures("way")
def test_no_slab_is_dequantized_for_single_tokens() -> None:
    """The step's memory does not grow with the slab."""
    problem = _Problem(Quantization(8, 64), "float32", None, run=False)
    wide = tuple(mx.concatenate([a, mx.zeros((HEADS, 200_000, a.shape[2]), a.dtype)], axis=1) for a in problem.slab)
    mx.eval(wide)
    problem.kv.arena = _Arena(wide, "float32", problem.form)
    problem.kv.arena.blocks = BLOCKS + 200_000 // BLOCK
    problem.kv.step = GroupStep(problem.kv.step.tables, problem.kv.step.lengths, (None, None), (), AttentionWindow())
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(reference.attend(problem.queries[:2], problem.kv, AttentionParams(0.125)))
    assert mx.get_peak_memory() - before < wide[0].nbytes / 8
