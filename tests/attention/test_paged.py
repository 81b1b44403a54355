"""`paged_attention` is what its backend makes of it, and what is derived from a step is made once."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from cortexmlx.attention.paged import AttentionParams, PagedKV, StepDerivedData, paged_attention
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import AttentionWindow, KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep

STEP = GroupStep(np.zeros((0, 0), np.int32), np.zeros(0, np.int32), (), (), AttentionWindow())


class One:
    def __init__(self, step: GroupStep) -> None:
        self.step = step


class Other(One):
    """Another kind of thing that is derived."""


def test_each_kind_is_derived_once_from_the_step() -> None:
    derived = StepDerivedData()
    one, other = derived.get(One, STEP), derived.get(Other, STEP)
    assert one is derived.get(One, STEP) and other is derived.get(Other, STEP)
    assert type(one) is One and type(other) is Other and one.step is STEP
    assert StepDerivedData().get(One, STEP) is not one


def test_the_backend_gets_what_the_model_gave() -> None:
    seen: list[Any] = []

    def attend(queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
        seen.append((queries, kv, params))
        return queries * 2

    arena = KVArena([LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))], 1, 8)
    kv = PagedKV(arena, 0, STEP, None, 0, mx.float32, attend)
    queries, params = mx.ones((3, 1, 1, 4)), AttentionParams(0.5, mx.zeros(1), 30.0, mx.ones(1))
    out = paged_attention(queries, kv.astype(mx.float16), params)
    assert np.array_equal(np.array(out), np.array(queries) * 2)
    assert len(seen) == 1 and seen[0][0] is queries and seen[0][1] is kv and seen[0][2] is params
