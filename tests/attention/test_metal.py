"""The Metal backend around the kernels: mixed steps, its own checks, and when it steps aside."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.attention import reference
from cortexmlx.attention.metal import DecodeKernelStep, MetalAttention
from cortexmlx.attention.paged import AttentionParams, PagedKV, StepDerivedData
from cortexmlx.errors import KVBlockError
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import AttentionWindow, KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep, PrefillPiece
from cortexmlx.metal.lab import sim
from support.kernels.broken_kernels import (
    COMPILE_ERROR,
    GPU_TIMEOUT,
    TOO_MANY_THREADS,
    copying,
    damaged,
    dropped,
    raising,
)
from support.kernels.paged_problem import TOLERANCE, error

pytestmark = pytest.mark.lab  # kernels are executed


BLOCK, HEADS, KV_HEADS, DIM = 8, 4, 2, 16
EVERYTHING = AttentionWindow()


class Step:
    """Single-token rows and prefill pieces over one random arena."""

    def __init__(
        self,
        lengths: Sequence[int],
        pieces: tuple[PrefillPiece, ...] = (),
        attention_window: AttentionWindow = EVERYTHING,
        dim: int = DIM,
        latent: int | None = None,
    ):
        random = np.random.default_rng(3)
        counts = [-(-n // BLOCK) for n in lengths]
        spec = KVSpec(KV_HEADS, dim, latent or dim, "float32", value_in_key=latent is not None)
        self.arena = KVArena([LayerGroup(spec, (0,))], 40, BLOCK)
        for slab in self.arena.slab(0):
            slab[:, : 40 * BLOCK] = mx.array(random.standard_normal((KV_HEADS, 40 * BLOCK, dim), np.float32))
        tables = np.full((len(lengths), max([1, *counts])), self.arena.null_block(0), np.int32)
        blocks = iter(random.permutation(np.arange(8, 40)))
        for row, count in enumerate(counts):
            tables[row, :count] = [next(blocks) for _ in range(count)]
        runs: tuple[KVHandle | None, ...] = (None,) * len(lengths)
        self.step = GroupStep(tables, np.array(lengths, np.int32), runs, pieces, attention_window)
        self.derived = StepDerivedData()
        flat = len(lengths) + sum(p.end - p.begin for p in pieces)
        self.queries = mx.array(random.standard_normal((flat, HEADS, 1, dim), np.float32))
        shape = (len(lengths), KV_HEADS, 16, dim)
        self.tail = tuple(mx.array(random.standard_normal(shape, np.float32)) for _ in spec.dims)

    def attend(self, backend: Any, tail_tokens: int, **options: Any) -> np.ndarray:
        tail = self.tail if tail_tokens else None
        kv = PagedKV(self.arena, 0, self.step, tail, tail_tokens, mx.float32, backend, self.derived)
        return np.array(backend(self.queries, kv, AttentionParams(0.25, **options)))


@pytest.fixture(scope="module")
def kernels() -> MetalAttention:
    return MetalAttention(sim.metal_kernel, check=False)


def _agree(step: Step, kernels: MetalAttention, tail_tokens: int, **options: Any) -> None:
    got, wanted = (step.attend(b, tail_tokens, **options) for b in (kernels.attend, reference.attend))
    assert error(got, wanted) < TOLERANCE["float32"]
    assert kernels.notes() == ()


@pytest.mark.parametrize(
    "attention_window",
    [EVERYTHING, AttentionWindow(9), AttentionWindow(16, chunked=True)],
    ids=["all", "window", "chunks"],
)
def test_a_decode_window_of_sixteen_steps(kernels: MetalAttention, attention_window: AttentionWindow) -> None:
    """Rows go on into their next chunk in the midst of the tail."""
    step = Step([30, 1, 8], attention_window=attention_window)
    _agree(step, kernels, 1)
    tables = step.derived.get(DecodeKernelStep, step.step).tables
    for tail_tokens in range(2, 17):
        _agree(step, kernels, tail_tokens)
        assert step.derived.get(DecodeKernelStep, step.step).tables is tables, (
            "block tables go to the device once per window"
        )


def test_a_step_with_prefill_pieces_of_one_run_and_scattered(kernels: MetalAttention) -> None:
    blocks = np.array([[30], [4], [17]])
    scattered = (blocks * BLOCK + np.arange(BLOCK)).reshape(-1)[:20].astype(np.int32)
    pieces = (PrefillPiece(2, 9, 5, KVHandle(2, 2), None), PrefillPiece(9, 14, 15, None, scattered))
    _agree(Step([17, 40], pieces), kernels, 0)
    _agree(Step([17, 40], pieces, AttentionWindow(6)), kernels, 0)
    _agree(Step([17, 40], pieces, AttentionWindow(8, chunked=True)), kernels, 0)


def test_values_that_lie_in_their_keys() -> None:
    """The wide kernel for the rows; pieces are left to MLX's attention, and nothing is said about it."""
    attention = MetalAttention(sim.metal_kernel, check=False)
    pieces = (PrefillPiece(2, 9, 5, KVHandle(2, 2), None),)
    _agree(Step([30, 17], dim=64, latent=32), attention, 2)
    _agree(Step([30, 17], pieces, dim=64, latent=32), attention, 0)
    assert attention.used_kernels() == ("wide",)


def test_few_sinks_and_a_softcap(kernels: MetalAttention) -> None:
    sinks = mx.array([0.5, -2.0, 3.0, 0.0])
    _agree(Step([30, 5]), kernels, 4, sinks=sinks)
    _agree(Step([30, 5]), kernels, 4, sinks=mx.log(mx.maximum(sinks, 0)))
    assert np.isfinite(np.array(kernels._per_head["sinks", 0][1])).all(), "no exponential takes an infinity"
    _agree(Step([30, 5]), kernels, 4, softcap=1.5)


def test_slopes_of_decoding_rows_and_of_pieces(kernels: MetalAttention) -> None:
    """A layer's slopes are not taken for its sinks, nor for those of another call, nor for none."""
    slopes, sinks = mx.array([0.5, 0.1, 0.03, 0.0]), mx.array([0.5, -2.0, 3.0, 0.0])
    _agree(Step([30, 5]), kernels, 4)
    _agree(Step([30, 5]), kernels, 4, slopes=slopes)
    _agree(Step([30, 5]), kernels, 4, slopes=slopes * 2, sinks=sinks)
    pieces = (PrefillPiece(2, 9, 5, KVHandle(2, 2), None),)
    _agree(Step([17, 40], pieces, AttentionWindow(12)), kernels, 0, slopes=slopes, sinks=sinks)
    without, level = (Step([30, 5]).attend(kernels.attend, 4, slopes=s) for s in (None, mx.zeros(4)))
    assert np.array_equal(without, level) and len(kernels._selected_methods) > 1


def test_queries_and_sinks_that_are_views_are_read_as_views(kernels: MetalAttention) -> None:
    """A model that splits one projection into queries, keys and values, and rotates nothing, hands views on."""
    step = Step([30, 5, 17])
    wide = mx.concatenate([step.queries, step.queries + 1.0], axis=1)
    step.queries = wide[:, :HEADS]
    mx.eval(step.queries)
    assert not memoryview(step.queries).c_contiguous
    _agree(step, kernels, 4)
    _agree(step, kernels, 4, sinks=mx.array([[0.5, -2.0, 3.0, 0.0], [9.0, 9.0, 9.0, 9.0]]).T.reshape(-1)[::2])


def test_a_slab_that_does_not_lie_row_by_row_is_refused_before_its_second_step(kernels: MetalAttention) -> None:
    """The kernels read it by its address: they would take one head's keys for another's."""
    step = Step([30, 5])
    for layer, name in enumerate(("keys", "values")):
        whole = step.arena._slabs[0]
        wrong = list(whole)
        wrong[layer] = mx.contiguous(whole[layer].swapaxes(0, 1)).swapaxes(0, 1)
        step.arena._slabs[0] = tuple(wrong)
        with pytest.raises(KVBlockError, match=f"layer 0's {name} .* strides"):
            step.attend(kernels.attend, 2)
        step.arena._slabs[0] = whole
    step.attend(kernels.attend, 2)


def test_a_shape_without_a_kernel_uses_the_reference_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    attention, step = MetalAttention(sim.metal_kernel), Step([9, 30], dim=18)
    with caplog.at_level(logging.WARNING, "cortexmlx"):
        outs = [step.attend(attention.attend, 3) for _ in range(2)]
    assert np.array_equal(outs[1], step.attend(reference.attend, 3))
    assert len(caplog.records) == 1 and "multiple of 4" in caplog.text
    assert "head_dim 18" in attention.notes()[0]


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (damaged(lambda a: a + 0.01, "reduce"), "differs from attention in float64"),
        (dropped("decode"), "decode launch was dropped"),
        (raising(ValueError(TOO_MANY_THREADS)), "maximum allowed threads per threadgroup (320)"),
        (copying(all_inputs=False), "read a copy of the keys and values"),
    ],
    ids=["wrong", "dropped", "raises", "copies"],
)
def test_a_variant_that_disagrees_is_disabled_with_a_warning(
    factory: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    attention, step = MetalAttention(factory), Step([9, 30])
    with caplog.at_level(logging.WARNING, "cortexmlx"):
        got = step.attend(attention.attend, 3)
    assert np.array_equal(got, step.attend(reference.attend, 3))
    assert says in caplog.text and says in attention.notes()[0]


def test_the_compilers_whole_message_is_in_the_log_and_in_the_notes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attention, step = MetalAttention(raising(RuntimeError(COMPILE_ERROR))), Step([9, 30])
    with caplog.at_level(logging.WARNING, "cortexmlx"):
        for _ in range(2):
            step.attend(attention.attend, 3)
    [record] = caplog.records
    lines = [line.strip() for line in record.getMessage().splitlines()]
    assert [line.strip() for line in COMPILE_ERROR.strip().splitlines()[1:]] == lines[2:]
    [note] = attention.notes()
    assert "program_source:412:14: error: cannot initialize" in note.splitlines()[0]
    assert record.getMessage().endswith(note.partition(": ")[2])


def test_the_check_runs_the_kernels_that_are_used_afterwards() -> None:
    """No launch after the check has another text: it would be compiled, unchecked, in the midst of an answer."""
    texts: dict[str, list[str]] = {"check": [], "use": []}
    phase = "check"

    def factory(**options: Any) -> Any:
        kernel = sim.metal_kernel(**options)

        def call(**call: Any) -> list[mx.array]:
            texts[phase].append(kernel.text(call["inputs"], call["output_dtypes"], call["template"]).text)
            return list(kernel(**call))

        return call

    for sinks in (None, mx.array([0.5, -2.0])):
        attention, short, long = MetalAttention(factory), Step([9, 30]), Step([32 * BLOCK])
        for step in (short, long):
            step.queries = step.queries[:, :2]
        phase = "check"
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(attention, "decode", lambda *given: given[1])
            short.attend(attention.attend, 3, sinks=sinks)
        phase = "use"
        short.attend(attention.attend, 3, sinks=sinks)
        assert len(texts["use"]) % 3 == 1, "one launch where every row has one partition"
        long.attend(attention.attend, 3, sinks=sinks)
    assert attention.notes() == () and len(texts["use"]) == 6
    assert set(texts["use"]) == set(texts["check"])


def test_kernels_are_checked_again_after_a_step_that_failed() -> None:
    """A kernel that passed and then fails in use is not trusted again; one that was slandered gets another chance."""
    good, broken_now = True, raising(RuntimeError(GPU_TIMEOUT))

    def factory(**options: Any) -> Any:
        right, wrong = sim.metal_kernel(**options), broken_now(**options)
        return lambda **call: (right if good else wrong)(**call)

    attention, step = MetalAttention(factory), Step([9, 30])
    wanted = step.attend(reference.attend, 3)
    step.attend(attention.attend, 3)
    good = False
    with pytest.raises(RuntimeError, match="GPU Timeout"):
        step.attend(attention.attend, 3)
    attention.reconsider()
    assert np.array_equal(step.attend(attention.attend, 3), wanted)
    assert GPU_TIMEOUT in attention.notes()[0]
    good = True
    attention.reconsider()
    step.attend(attention.attend, 3)
    assert attention.notes() == ()


def test_a_variant_that_agrees_is_used() -> None:
    attention, step = MetalAttention(sim.metal_kernel), Step([9, 30])
    with sim.recording(coalescing=False) as recorded:
        step.attend(attention.attend, 3)
        checked = len(recorded.launches)
        step.attend(attention.attend, 3)
    assert attention.notes() == () and checked == 10 and len(recorded.launches) == 11


def test_no_output_aliases_an_input_and_inputs_stay_as_they_are() -> None:
    step = Step([30, 5])
    inputs = [*step.arena.slab(0), *step.tail, step.queries]
    before = [np.array(a) for a in inputs]
    made: list[mx.array] = []

    def factory(**options: Any) -> Any:
        kernel = sim.metal_kernel(**options)

        def call(**call_options: Any) -> list[mx.array]:
            out = kernel(**call_options)
            assert not any(np.shares_memory(np.asarray(o), np.asarray(i)) for o in out for i in call_options["inputs"])
            made.extend(out)
            return list(out)

        return call

    step.attend(MetalAttention(factory, check=False).attend, 3)
    Step([32 * BLOCK]).attend(MetalAttention(factory, check=False).attend, 3)
    assert len(made) == 1 + 2, "a whole result; partial results and their sum"
    assert all(np.array_equal(np.array(a), b) for a, b in zip(inputs, before, strict=True))


def test_a_row_is_bitwise_the_same_alone_and_in_a_batch_through_the_backend(kernels: MetalAttention) -> None:
    # Seven slices: were they cut in two partitions, they would be summed in another order.
    step = Step([200, 40, 3])
    together = step.attend(kernels.attend, 5)
    for row in range(3):
        alone = Step([200, 40, 3])
        alone.step = GroupStep(
            step.step.tables[row : row + 1], step.step.lengths[row : row + 1], (None,), (), AttentionWindow()
        )
        alone.queries = step.queries[row : row + 1]
        alone.tail = tuple(t[row : row + 1] for t in step.tail)
        assert np.array_equal(alone.attend(kernels.attend, 5)[0], together[row])
