"""Prefill pieces on the tiled kernel: which layers have it, what it is given, and when it steps aside."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.attention import autotuning, reference
from cortexmlx.attention.autotuning import PREFILL_BY_MLX, PREFILL_KERNEL, apply_prefill_choices, prefill_jobs
from cortexmlx.attention.metal import MetalAttention, PrefillKernelStep
from cortexmlx.attention.paged import AttentionCall, AttentionParams, PagedKV, StepDerivedData
from cortexmlx.autotune.chooser import Autotuner
from cortexmlx.autotune.job import Candidate
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import AttentionWindow, KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep, PrefillPiece
from cortexmlx.metal.lab import sim
from support.kernels.broken_kernels import COMPILE_ERROR, broken, copying, damaged, dropped, raising
from support.kernels.paged_problem import TOLERANCE, error
from support.scripted_choice import Clock

pytestmark = pytest.mark.lab  # kernels are executed


BLOCK, HEADS, KV_HEADS = 8, 4, 2
EVERYTHING = AttentionWindow()
SCATTERED = (np.array([[30], [4], [17]]) * BLOCK + np.arange(BLOCK)).reshape(-1)[:20].astype(np.int32)
PIECES = (PrefillPiece(0, 7, 5, KVHandle(2, 2), None), PrefillPiece(7, 12, 15, None, SCATTERED))


class Layer:
    """A step of prefill pieces alone, over a random arena."""

    def __init__(self, attention_window: AttentionWindow = EVERYTHING, dim: int = 16) -> None:
        random = np.random.default_rng(3)
        self.arena = KVArena([LayerGroup(KVSpec(KV_HEADS, dim, dim, "float32"), (0,))], 40, BLOCK)
        for slab in self.arena.slab(0):
            slab[:, : 40 * BLOCK] = mx.array(random.standard_normal((KV_HEADS, 40 * BLOCK, dim), np.float32))
        self.step = GroupStep(np.zeros((0, 0), np.int32), np.zeros(0, np.int32), (), PIECES, attention_window)
        self.queries = mx.array(random.standard_normal((12, HEADS, 1, dim), np.float32))
        self.derived = StepDerivedData()

    def attend(self, backend: Any, **options: Any) -> np.ndarray:
        kv = PagedKV(self.arena, 0, self.step, None, 0, mx.float32, backend, self.derived)
        return np.array(backend(self.queries, kv, AttentionParams(0.25, **options)))


@pytest.mark.parametrize(
    "attention_window",
    [EVERYTHING, AttentionWindow(6), AttentionWindow(16, chunked=True)],
    ids=["all", "window", "chunks"],
)
def test_pieces_alone_are_attended_to_in_one_launch(attention_window: AttentionWindow) -> None:
    launches = []
    attention = MetalAttention(broken(lambda kernel, call: launches.append(call) or kernel(**call)), check=False)
    layer = Layer(attention_window)
    for _ in range(2):
        assert error(layer.attend(attention.attend), layer.attend(reference.attend)) < TOLERANCE["float32"]
    assert len(launches) == 2 and attention.used_kernels() == ("prefill",) and attention.notes() == ()
    first, second = (layer.derived.get(PrefillKernelStep, layer.step).work_list(BLOCK, 32) for _ in range(2))
    assert first is second, "the work list goes to the device once for all layers"


def test_layers_with_other_tiles_have_lists_of_their_own() -> None:
    """What is kept for a step is kept for each tile: a kernel of shorter tiles would leave out most of a longer one."""
    layer = Layer()
    step = layer.derived.get(PrefillKernelStep, layer.step)
    assert [step.work_list(BLOCK, tile).items for tile in (32, 8, 32)] == [2, 4, 2]


def test_queries_that_are_views_are_read_as_views() -> None:
    attention, layer = MetalAttention(sim.metal_kernel, check=False), Layer()
    layer.queries = mx.concatenate([layer.queries, layer.queries + 1.0], axis=1)[:, :HEADS]
    mx.eval(layer.queries)
    assert not memoryview(layer.queries).c_contiguous
    assert error(layer.attend(attention.attend), layer.attend(reference.attend)) < TOLERANCE["float32"]


def test_sinks_and_a_softcap_reach_the_kernel() -> None:
    attention, layer = MetalAttention(sim.metal_kernel, check=False), Layer()
    options = {"sinks": mx.array([0.5, -2.0, 3.0, 0.0]), "softcap": 1.5}
    got, wanted = (layer.attend(a, **options) for a in (attention.attend, reference.attend))
    assert error(got, wanted) < TOLERANCE["float32"] and attention.used_kernels() == ("prefill",)


@pytest.mark.parametrize(
    ("attention_window", "matrix_units"),
    [(EVERYTHING, False), (AttentionWindow(600), True), (AttentionWindow(8, chunked=True), False)],
    ids=["fused", "wide beside matrix units", "fused but for pieces in two chunks"],
)
def test_what_mlx_does_as_well_is_left_to_it(attention_window: AttentionWindow, matrix_units: bool) -> None:
    unused = raising(RuntimeError("not to be called"), "prefill")
    attention, layer = MetalAttention(unused, check=False, matrix_units=matrix_units), Layer(attention_window, dim=64)
    assert np.array_equal(layer.attend(attention.attend), layer.attend(reference.attend))
    assert attention.used_kernels() == attention.notes() == ()


def test_chunks_have_the_same_bits_however_their_prompt_is_cut() -> None:
    attention, layer, run = (
        MetalAttention(sim.metal_kernel, check=False),
        Layer(AttentionWindow(16, chunked=True)),
        KVHandle(2, 4),
    )
    found = []
    for ends in ((17,), (3, 11, 17), (8, 9, 17)):
        begins = (0, *ends)
        pieces = (PrefillPiece(b, e, 13 + b, run, None) for b, e in zip(begins, ends, strict=False))
        layer.step, layer.derived = replace(layer.step, pieces=tuple(pieces)), StepDerivedData()
        layer.queries = mx.random.normal((17, HEADS, 1, 16), key=mx.random.key(1))
        found.append(layer.attend(attention.attend))
    assert attention.used_kernels() == ("prefill",) and all(np.array_equal(found[0], other) for other in found[1:])


def test_chunks_that_end_within_blocks_use_the_reference_and_say_so() -> None:
    attention, layer = MetalAttention(sim.metal_kernel, check=False), Layer(AttentionWindow(12, chunked=True))
    assert np.array_equal(layer.attend(attention.attend), layer.attend(reference.attend))
    assert "chunks of 12 tokens are not of whole blocks" in attention.notes()[0]
    assert not np.array_equal(layer.attend(reference.attend), Layer(AttentionWindow(12)).attend(reference.attend))
    other = Layer()
    assert error(other.attend(attention.attend), other.attend(reference.attend)) < TOLERANCE["float32"]
    assert attention.used_kernels() == ("prefill",), "layers without chunks have the kernel all the same"


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (damaged(lambda a: a + 0.01, "prefill"), "differs from attention in float64"),
        (dropped("prefill"), "prefill launch was dropped"),
        (raising(RuntimeError(COMPILE_ERROR), "prefill"), "program_source:412:14: error: cannot initialize"),
        (copying(all_inputs=False), "prefill launch read a copy of the keys and values"),
    ],
    ids=["wrong", "dropped", "does not compile", "copies"],
)
def test_a_kernel_that_disagrees_is_disabled_with_a_warning(
    factory: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    attention, layer = MetalAttention(factory), Layer()
    with caplog.at_level(logging.WARNING, "cortexmlx"):
        outs = [layer.attend(attention.attend) for _ in range(2)]
    assert np.array_equal(outs[0], layer.attend(reference.attend)) and np.array_equal(*outs)
    assert len(caplog.records) == 1 and says in caplog.text
    assert says in attention.notes()[0] and attention.used_kernels() == ()
    attention.reconsider()
    assert attention.notes() == ()


# Timed: which way a layer's pieces take, whatever the rules prefer.


CALL, SPEC = AttentionCall("float32", HEADS, 16, False, False, False), KVSpec(KV_HEADS, 16, 16, "float32")


def timed(attention: MetalAttention, fastest: str, spec: KVSpec = SPEC) -> Autotuner:
    """Choose by scripted times: both ways are computed and compared, and `fastest` takes half as long."""
    jobs, clock = prefill_jobs([(CALL, spec)], attention, BLOCK), Clock()

    def scripted(candidate: Candidate) -> Candidate:
        def prepare() -> Callable[[], object]:
            run, seconds = candidate.prepare(), 1.0 if candidate.name == fastest else 2.0

            def compute() -> None:
                run()
                clock.now += seconds

            return compute

        return replace(candidate, prepare=prepare)

    jobs = {key: replace(job, candidates=tuple(map(scripted, job.candidates))) for key, job in jobs.items()}
    chooser = Autotuner(None, clock)
    chooser.choose(jobs.values(), seconds=1e6)
    apply_prefill_choices(attention, jobs, chooser)
    return chooser


@pytest.fixture
def small_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotuning, "_PIECE_TOKENS", 9)
    monkeypatch.setattr(autotuning, "_PIECE_CONTEXT", 14)


@pytest.mark.parametrize("fastest", [PREFILL_KERNEL, PREFILL_BY_MLX])
@pytest.mark.parametrize("matrix_units", [False, True])
def test_the_faster_way_computes_all_pieces_of_a_kind_of_layer(
    fastest: str, matrix_units: bool, small_piece: None
) -> None:
    """Without matrix units the rules prefer the kernel at heads of 16, and MLX with them."""
    attention, layer = MetalAttention(sim.metal_kernel, check=False, matrix_units=matrix_units), Layer()
    [choice] = timed(attention, fastest).choices()
    assert choice.chosen == fastest and choice.job.startswith("prefill float32") and not choice.refused
    attention.prefill.reconsider()  # of what was asked while timing
    wanted = layer.attend(reference.attend)
    found = layer.attend(attention.attend)
    assert error(found, wanted) < TOLERANCE["float32"]
    assert (attention.used_kernels() == ("prefill",)) == (fastest == PREFILL_KERNEL)
    other = Layer(AttentionWindow(6))
    other.attend(attention.attend)
    assert attention.used_kernels() == ("prefill",), "a layer with a window is another kind, and the rules choose"


def test_a_prefill_kernel_that_is_wrong_is_not_chosen_however_fast(small_piece: None) -> None:
    attention = MetalAttention(damaged(lambda a: a + 0.5, "prefill"), check=False)
    [choice] = timed(attention, PREFILL_KERNEL).choices()
    assert choice.chosen == PREFILL_KERNEL, "the first way is what others are compared with"
    assert "differs by" in choice.refused[PREFILL_BY_MLX]
    checked = MetalAttention(damaged(lambda a: a + 0.5, "prefill"))
    [choice] = timed(checked, PREFILL_KERNEL).choices()
    assert choice.chosen == PREFILL_BY_MLX and "disagrees" in choice.refused[PREFILL_KERNEL]


@pytest.mark.parametrize(
    ("call", "spec"),
    [
        (replace(CALL, slopes=True), SPEC),
        (CALL, replace(SPEC, kv_bits=8, kv_group_size=16)),
        (CALL, replace(SPEC, window=12, chunked=True)),
    ],
    ids=["slopes", "quantized", "chunks that end within blocks"],
)
def test_what_the_kernel_does_not_compute_is_not_timed(call: AttentionCall, spec: KVSpec) -> None:
    assert prefill_jobs([(call, spec)], MetalAttention(sim.metal_kernel, check=False), BLOCK) == {}
