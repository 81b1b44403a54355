"""What the methods of a layer are timed on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.attention import autotuning
from cortexmlx.attention.autotuning import TimedArena, TimedProblem, attentions_per_run
from cortexmlx.attention.decode_methods import MLX_METHODS, BatchClass, DecodeMethod, LayerAttention, mlx_methods_for
from cortexmlx.autotune.job import CannotServe
from cortexmlx.kv.spec import KVSpec

LAYER = LayerAttention("float32", 8, KVSpec(2, 64, 64, "float32"), 16, 0.125, None, None, False, None)
FEW, ONE_RUN, PIECES = BatchClass(4, 512), BatchClass(1, 512, True), BatchClass(1, 512)
SHAPES = {
    "plain": LAYER,
    "sinks": replace(LAYER, sinks="float32"),
    "softcap": replace(LAYER, softcap=3.0),
    "slopes": replace(LAYER, slopes=True),
    "quantized": replace(LAYER, spec=replace(LAYER.spec, kv_bits=8, kv_group_size=64)),
    "latent": replace(LAYER, query_heads=4, spec=KVSpec(1, 80, 64, "float32", value_in_key=True)),
    "half": replace(LAYER, dtype="float16", spec=replace(LAYER.spec, dtype="float16")),
}


@pytest.mark.parametrize("batch", [FEW, ONE_RUN, PIECES], ids=["few", "run", "pieces"])
@pytest.mark.parametrize("layer", SHAPES.values(), ids=SHAPES.keys())
def test_every_way_that_serves_a_layer_agrees_with_the_first(layer: LayerAttention, batch: BatchClass) -> None:
    made = TimedProblem(layer, batch, 1 if batch.rows == 1 else 4, 100, TimedArena())
    for method in (*mlx_methods_for(layer, batch), DecodeMethod.ROWS):
        made.require_agreement(MLX_METHODS[method])
        made.build_run(MLX_METHODS[method])()


def test_a_launch_that_was_dropped_is_no_fast_one() -> None:
    """It leaves zeros. So does a wrong result, or none at all, not serve."""
    made = TimedProblem(LAYER, FEW, 4, 300, TimedArena())
    made.require_agreement(MLX_METHODS[DecodeMethod.REFERENCE])
    for factor in (0.0, 1.1, float("nan")):

        def wrong(*given: Any, factor: float = factor) -> mx.array:
            return MLX_METHODS[DecodeMethod.REFERENCE](*given) * factor

        with pytest.raises(CannotServe, match="differs by"):
            made.require_agreement(wrong)
    made.require_agreement(MLX_METHODS[DecodeMethod.GATHER])


def test_a_runs_attentions_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would compute independent ones side by side, and no layer of a model runs beside another."""
    monkeypatch.setattr(autotuning, "attentions_per_run", lambda *shape: 3)
    made = TimedProblem(LAYER, FEW, 2, 50, TimedArena())
    given = []

    def attend(queries: mx.array, *others: Any) -> mx.array:
        given.append(queries)
        return MLX_METHODS[DecodeMethod.REFERENCE](queries, *others)

    made.build_run(attend)()
    assert len(given) == 3
    assert all(np.array_equal(np.array(given[0]), np.array(later)) for later in given)
    assert given[0] is not given[1] is not given[2]


def test_a_gpu_computes_several_at_once_where_they_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attentions_per_run(LAYER, 1, 256) == 1
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert attentions_per_run(LAYER, 1, 256) == 8
    assert attentions_per_run(LAYER, 16, 8192) == 1


def test_memory_is_bounded_and_rows_share_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotuning, "MAX_KV_BYTES", 10 * 16 * LAYER.spec.bytes_per_token)
    slabs = TimedArena()
    TimedProblem(LAYER, FEW, 4, 16 * 8, slabs).require_agreement(MLX_METHODS[DecodeMethod.REFERENCE])
    assert slabs.arena_for(LAYER, 1).blocks == (10,)
    TimedProblem(LAYER, ONE_RUN, 1, 16 * 20, slabs).require_agreement(MLX_METHODS[DecodeMethod.VIEW])
    assert slabs.arena_for(LAYER, 1).blocks == (20,), "one row has its own blocks, however many"


def test_jobs_of_a_layer_share_its_slabs() -> None:
    slabs = TimedArena()
    first = slabs.arena_for(LAYER, 4)
    assert slabs.arena_for(LAYER, 3) is first
    assert slabs.arena_for(LAYER, 5) is not first
    other = slabs.arena_for(replace(LAYER, sinks="float32"), 2)
    assert other.blocks == (2,)
