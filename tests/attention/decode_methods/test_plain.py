"""The methods of attention that are MLX's own, against float64 NumPy, and where each of them serves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import pytest
from hypothesis import given, settings

from cortexmlx.attention import decode_methods, reference
from cortexmlx.attention.decode_methods import (
    MAX_COPIED_BYTES,
    MLX_METHODS,
    BatchClass,
    DecodeMethod,
    LayerAttention,
    mlx_methods_for,
)
from cortexmlx.attention.paged import Attend, AttentionParams, PagedKV
from cortexmlx.kv.spec import KVSpec
from support.effort import examples
from support.kernels.attention_case import Case

LAYER = LayerAttention("float32", 8, KVSpec(2, 64, 64, "float32"), 32, 0.125, None, None, False, None)
ONE_RUN, PIECES, FEW = BatchClass(1, 512, True), BatchClass(1, 512), BatchClass(4, 512)


def attend_by(method: DecodeMethod) -> Attend:
    """Attention that takes a method in every step that it serves, and counts them."""

    def attend(queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
        rows = kv.step.rows
        plain = kv.value_in_key is None and params.slopes is None
        serves = {
            DecodeMethod.VIEW: plain and params.softcap is None and rows == 1 and kv.step.runs[0] is not None,
            DecodeMethod.GATHER: plain and (params.sinks is None or params.softcap is None),
        }.get(method, True)
        if not rows or not serves:
            return reference.attend(queries, kv, params)
        parts = [MLX_METHODS[method](queries, kv, params)]
        if kv.step.pieces:
            parts += reference.attend_pieces(queries, kv, params)
        return mx.concatenate(parts)

    return attend


@pytest.mark.parametrize("method", [DecodeMethod.VIEW, DecodeMethod.GATHER, DecodeMethod.ROWS])
@given(data=st.data())
@settings(max_examples=examples(60, few=10), deadline=None)
def test_any_step_is_softmax_attention(method: DecodeMethod, data: st.DataObject) -> None:
    Case(data.draw, attend_by(method)).run()


@pytest.mark.parametrize(
    ("tail", "window", "dtype"),
    [(0, None, "float32"), (1, 3, "float32"), (16, 20, "float32"), (16, 3, "bfloat16"), (0, 20, "bfloat16")],
)
def test_a_lone_row_over_its_view(tail: int, window: int | None, dtype: str) -> None:
    """With a window that begins in the arena, or within the tail."""
    chosen: list[Any] = [7, 8, (2, 3), (16, 8, False), dtype, dtype, window, False, None]
    chosen += [*([0.3] if dtype == "float32" else []), True, False, tail, 1, 33, *([] if tail else [0]), True, False]
    given = iter(chosen)
    Case(lambda _: next(given), attend_by(DecodeMethod.VIEW)).run()
    assert next(given, None) is None, "everything that was chosen is part of the case"


def test_where_each_way_serves() -> None:
    assert mlx_methods_for(LAYER, ONE_RUN) == (DecodeMethod.REFERENCE, DecodeMethod.VIEW)
    assert (
        mlx_methods_for(LAYER, PIECES) == mlx_methods_for(LAYER, FEW) == (DecodeMethod.REFERENCE, DecodeMethod.GATHER)
    )
    quantized = replace(LAYER, spec=replace(LAYER.spec, kv_bits=8, kv_group_size=64))
    assert mlx_methods_for(quantized, ONE_RUN) == (DecodeMethod.REFERENCE,)
    assert mlx_methods_for(quantized, FEW) == (DecodeMethod.REFERENCE, DecodeMethod.GATHER)
    capped = replace(LAYER, softcap=5.0)
    assert mlx_methods_for(capped, ONE_RUN) == (DecodeMethod.REFERENCE,)
    assert mlx_methods_for(capped, FEW) == (DecodeMethod.REFERENCE, DecodeMethod.GATHER)
    for other in (
        replace(LAYER, slopes=True),
        replace(capped, sinks="float32"),
        replace(LAYER, spec=KVSpec(1, 80, 64, "float32", value_in_key=True)),
    ):
        assert mlx_methods_for(other, FEW) == mlx_methods_for(other, PIECES) == (DecodeMethod.REFERENCE,)


def test_below_float32_a_cpu_has_one_way_and_a_gpu_several(monkeypatch: pytest.MonkeyPatch) -> None:
    half = replace(LAYER, dtype="float16", spec=replace(LAYER.spec, dtype="float16"))
    assert mlx_methods_for(half, FEW) == (DecodeMethod.REFERENCE,)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert mlx_methods_for(half, FEW) == (DecodeMethod.REFERENCE, DecodeMethod.GATHER)


def test_no_way_copies_more_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the rows or their lengths have no bound, nothing is copied at all."""
    per_token = 2 * 2 * 64 * 4
    assert (
        mlx_methods_for(LAYER, BatchClass(4, None))
        == mlx_methods_for(LAYER, BatchClass(None, 512))
        == (DecodeMethod.REFERENCE,)
    )
    assert FEW.max_total_tokens is not None and FEW.max_total_tokens * per_token < MAX_COPIED_BYTES
    monkeypatch.setattr(decode_methods, "MAX_COPIED_BYTES", FEW.max_total_tokens * per_token)
    assert mlx_methods_for(LAYER, FEW) == (DecodeMethod.REFERENCE, DecodeMethod.GATHER)
    monkeypatch.setattr(decode_methods, "MAX_COPIED_BYTES", FEW.max_total_tokens * per_token - 1)
    assert mlx_methods_for(LAYER, FEW) == (DecodeMethod.REFERENCE,)
    assert mlx_methods_for(LAYER, ONE_RUN) == (DecodeMethod.REFERENCE, DecodeMethod.VIEW)
