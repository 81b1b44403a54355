"""Short pieces as rows of the decode kernels: the same tokens in any order, with the bits of decoding."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.attention import reference
from cortexmlx.attention.metal import MAX_TOKENS_AS_ROWS, MetalAttention, ShortPieceRows
from cortexmlx.attention.paged import AttentionParams, PagedKV, StepDerivedData
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import AttentionWindow, KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep, PrefillPiece
from cortexmlx.metal.lab import sim
from support.kernels.paged_problem import TOLERANCE, error

pytestmark = pytest.mark.lab  # kernels are executed


BLOCK, DIM, HEADS, KV_HEADS = 8, 64, 4, 2
SCATTERED = (np.array([[30], [4], [17]]) * BLOCK + np.arange(BLOCK)).reshape(-1)[:19].astype(np.int32)
PIECES = (
    PrefillPiece(2, 9, 5, KVHandle(20, 2), None),
    PrefillPiece(9, 9 + MAX_TOKENS_AS_ROWS, 19 - MAX_TOKENS_AS_ROWS, None, SCATTERED),
    PrefillPiece(9 + MAX_TOKENS_AS_ROWS, 11 + MAX_TOKENS_AS_ROWS, 14, KVHandle(10, 2), None),
)
"""The one that is too long comes first, so the others must be brought to the rows, and back."""


class Layer:
    """Two decoding rows and pieces over a random arena."""

    def __init__(self, attention_window: AttentionWindow, pieces: tuple[PrefillPiece, ...] = PIECES) -> None:
        random = np.random.default_rng(5)
        self.arena = KVArena([LayerGroup(KVSpec(KV_HEADS, DIM, DIM, "float32"), (0,))], 40, BLOCK)
        for slab in self.arena.slab(0):
            slab[:, : 40 * BLOCK] = mx.array(random.standard_normal((KV_HEADS, 40 * BLOCK, DIM), np.float32))
        tables = np.array([[1, 2, 3], [6, 40, 40]], np.int32)
        self.step = GroupStep(tables, np.array([18, 8], np.int32), (None, None), pieces, attention_window)
        tokens = max([2, *(piece.end for piece in pieces)])
        self.queries = mx.array(random.standard_normal((tokens, HEADS, 1, DIM), np.float32))

    def attend(self, backend: Any, **options: Any) -> np.ndarray:
        kv = PagedKV(self.arena, 0, self.step, None, 0, mx.float32, backend, StepDerivedData())
        return np.array(backend(self.queries, kv, AttentionParams(0.125, **options)))


def attention() -> MetalAttention:
    """The backend where MLX's products have units of their own: it leaves windows of pieces to MLX's attention."""
    return MetalAttention(sim.metal_kernel, check=False, matrix_units=True)


@pytest.mark.parametrize(
    "attention_window", [AttentionWindow(), AttentionWindow(150), AttentionWindow(16, chunked=True)]
)
def test_pieces_of_a_few_tokens_are_rows_of_the_decode_kernel(
    attention_window: AttentionWindow, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    kernels, decode = attention(), MetalAttention.decode
    noted = lambda self, *given: rows.append(given[2].step.rows) or decode(self, *given)  # noqa: E731
    monkeypatch.setattr(MetalAttention, "decode", noted)
    layer = Layer(attention_window)
    sinks = mx.array([0.5, -1.0, 2.0, 0.0])
    for options in ({}, {"sinks": sinks}, {"slopes": mx.array([0.5, 0.02, 0.1, 0.0])}):
        assert error(layer.attend(kernels.attend, **options), layer.attend(reference.attend, **options)) < 1e-5
    assert rows == [2 + MAX_TOKENS_AS_ROWS + 2] * 3 and kernels.notes() == ()


def test_a_verified_token_has_the_bits_of_a_decoded_one() -> None:
    kernels, layer = attention(), Layer(AttentionWindow())
    together = layer.attend(kernels.attend)
    piece = PIECES[2]
    for token in range(piece.begin, piece.end):
        alone = Layer(AttentionWindow(), ())
        length = piece.first + token - piece.begin + 1
        alone.step = GroupStep(
            np.array([[10, 11]], np.int32), np.array([length], np.int32), (None,), (), AttentionWindow()
        )
        alone.queries = layer.queries[token : token + 1]
        assert np.array_equal(alone.attend(kernels.attend)[0], together[token])


def test_pieces_alone_need_no_order_and_no_decoding_rows() -> None:
    pieces = (PrefillPiece(0, 2, 14, KVHandle(10, 2), None), PrefillPiece(2, 5, 0, KVHandle(20, 1), None))
    layer = Layer(AttentionWindow(), pieces)
    layer.step = GroupStep(np.zeros((0, 0), np.int32), np.zeros(0, np.int32), (), pieces, AttentionWindow())
    rows = ShortPieceRows(layer.step)
    assert (
        rows
        and rows.reorder_queries(layer.queries) is layer.queries
        and rows.restore_order(layer.queries) is layer.queries
    )
    made = rows.step(BLOCK, 70_000)
    assert made.tables.tolist() == [[10, 11], [10, 11], [20, 70_000], [20, 70_000], [20, 70_000]]
    assert made.lengths.tolist() == [15, 16, 1, 2, 3] and made.pieces == () and made.lengths.dtype == np.int32
    assert error(layer.attend(attention().attend), layer.attend(reference.attend)) < TOLERANCE["float32"]
    assert not ShortPieceRows(
        GroupStep(*NO_ROWS, (PrefillPiece(0, MAX_TOKENS_AS_ROWS + 1, 0, KVHandle(1, 1), None),), AttentionWindow())
    )


NO_ROWS = (np.zeros((0, 0), np.int32), np.zeros(0, np.int32), ())


def test_pieces_stay_pieces_where_an_answer_must_be_repeatable() -> None:
    """How a prompt is cut depends on the other requests, and so must not decide what computes its tokens."""
    kernels, layer = attention(), Layer(AttentionWindow())
    kernels.methods.choices.reproducible = True
    wanted = reference.attend_pieces(
        layer.queries,
        PagedKV(layer.arena, 0, layer.step, None, 0, mx.float32, reference.attend, StepDerivedData()),
        AttentionParams(0.125),
        one_by_one=True,
    )
    assert np.array_equal(layer.attend(kernels.attend)[2:], np.array(mx.concatenate(wanted)))
