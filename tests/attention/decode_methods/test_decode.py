"""The reference backend takes the method that was chosen for the class of its step, and keeps it within a window."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.attention import decode_methods, reference
from cortexmlx.attention.decode_methods import (
    MLX_METHODS,
    BatchClass,
    DecodeMethod,
    LayerAttention,
    ReferenceAttention,
    layer_key,
    reproducible_mlx_method,
)
from cortexmlx.attention.paged import AttentionParams, PagedKV, StepDerivedData
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import AttentionWindow, KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep, PrefillPiece

SPEC = KVSpec(2, 8, 8, "float32")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[DecodeMethod]:
    """The plain methods that were taken."""
    found: list[DecodeMethod] = []

    def noting(method: DecodeMethod) -> Any:
        real = MLX_METHODS[method]
        return lambda *given: (found.append(method), real(*given))[1]

    monkeypatch.setattr(decode_methods, "MLX_METHODS", {method: noting(method) for method in MLX_METHODS})
    return found


def kv_of(lengths: list[int], tail: int = 1, pieces: tuple[PrefillPiece, ...] = (), dtype: str = "float32") -> PagedKV:
    spec = KVSpec(2, 8, 8, dtype)
    arena = KVArena([LayerGroup(spec, (0,))], 100, 8)
    rows = len(lengths)
    counts = [-(-n // 8) for n in lengths]
    tables = np.full((rows, max(counts, default=0)), arena.null_block(0), np.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = np.arange(count)
    runs = tuple(KVHandle(0, count) for count in counts)
    step = GroupStep(tables, np.array(lengths, np.int32), runs, pieces, AttentionWindow())
    newest = tuple(mx.zeros((rows, 2, 16, 8), getattr(mx, dtype)) for _ in range(2)) if tail else None
    return PagedKV(arena, 0, step, newest, tail, getattr(mx, dtype), reference.attend, StepDerivedData())


def queries_of(kv: PagedKV, flat: int | None = None) -> mx.array:
    return mx.ones((flat or kv.step.rows, 4, 1, 8), kv.dtype)


def test_without_choices_the_rules_choose(taken: list[DecodeMethod]) -> None:
    backend, kv = ReferenceAttention(), kv_of([20, 9])
    got = backend.attend(queries_of(kv), kv, AttentionParams(1.0))
    assert np.array_equal(np.array(got), np.array(reference.attend(queries_of(kv), kv, AttentionParams(1.0))))
    assert taken == []


def test_the_way_of_a_class_serves_its_steps_and_no_others(taken: list[DecodeMethod]) -> None:
    backend = ReferenceAttention()
    kv = kv_of([20, 9])
    key = layer_key(queries_of(kv), kv, AttentionParams(1.0))
    backend.choices.set_methods(
        {(key, BatchClass(4, 512)): DecodeMethod.GATHER, (key, BatchClass(1, 512, True)): DecodeMethod.VIEW}
    )
    for lengths in ([20, 9], [20], [600, 3]):
        kv = kv_of(lengths)
        backend.attend(queries_of(kv), kv, AttentionParams(1.0))
    assert taken == [DecodeMethod.GATHER, DecodeMethod.VIEW]
    kv = kv_of([20])
    backend.attend(queries_of(kv), kv, AttentionParams(1.0, sinks=mx.zeros(4)))
    assert taken == [DecodeMethod.GATHER, DecodeMethod.VIEW], "a layer with sinks is another layer"


def test_a_row_keeps_its_way_within_a_decode_window(taken: list[DecodeMethod]) -> None:
    """511 tokens become 527 with the tail's, which would be another class at the window's beginning."""
    backend, kv = ReferenceAttention(), kv_of([511])
    key = layer_key(queries_of(kv), kv, AttentionParams(1.0))
    backend.choices.set_methods({(key, BatchClass(1, 512, True)): DecodeMethod.VIEW})
    for tail in range(1, 17):
        kv.tail_tokens = tail
        backend.attend(queries_of(kv), kv, AttentionParams(1.0))
    assert taken == [DecodeMethod.VIEW] * 16


def test_pieces_are_computed_as_ever(taken: list[DecodeMethod]) -> None:
    piece = PrefillPiece(1, 4, 5, KVHandle(10, 1), None)
    backend, kv = ReferenceAttention(), kv_of([20], tail=0, pieces=(piece,))
    key = layer_key(queries_of(kv), kv, AttentionParams(1.0))
    backend.choices.set_methods({(key, BatchClass(1, 512, True)): DecodeMethod.VIEW})
    queries = queries_of(kv, 4)
    got, wanted = (a.attend(queries, kv, AttentionParams(1.0)) for a in (backend, reference))
    assert taken == [DecodeMethod.VIEW] and got.shape == wanted.shape
    assert np.allclose(np.array(got), np.array(wanted), atol=1e-6)
    only = kv_of([], tail=0, pieces=(PrefillPiece(0, 3, 5, KVHandle(10, 1), None),))
    backend.attend(queries_of(only, 3), only, AttentionParams(1.0))
    assert taken == [DecodeMethod.VIEW]


def test_a_reproducible_backend_has_one_way_for_all_steps(taken: list[DecodeMethod]) -> None:
    backend = ReferenceAttention()
    backend.choices.reproducible = True
    for lengths in ([20], [20, 9], [600] * 5):
        kv = kv_of(lengths)
        backend.attend(queries_of(kv), kv, AttentionParams(1.0))
    half = kv_of([20, 9], dtype="float16")
    backend.attend(queries_of(half), half, AttentionParams(1.0))
    backend.attend(queries_of(half), half, AttentionParams(1.0, slopes=mx.zeros(4)))
    assert taken == [DecodeMethod.ROWS] * 3 + [DecodeMethod.REFERENCE, DecodeMethod.ROWS]


def test_the_way_that_is_told_is_the_way_that_is_taken() -> None:
    backend = ReferenceAttention()
    for dtype, sinks, softcap in (("float32", None, None), ("float16", None, None), ("float16", "float16", 5.0)):
        layer = LayerAttention(dtype, 4, SPEC, 8, 1.0, softcap, sinks, False, None)
        kv = kv_of([20], dtype=dtype)
        kind = None if sinks is None else mx.zeros(4, mx.float16)
        backend.choices.reproducible = True
        taken = backend._method_for(queries_of(kv), kv, AttentionParams(1.0, kind, softcap))
        assert backend.reproducible_method(layer) is taken
    assert reproducible_mlx_method(True, True, True, False) is DecodeMethod.ROWS
    assert reproducible_mlx_method(True, True, False, False) is DecodeMethod.REFERENCE
