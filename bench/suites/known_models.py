"""Measures the kernels in the sizes of three well-known models, for `cortexmlx doctor --report`: bytes, time, share of
the memory's bandwidth, and MLX's time beside it. Each figure is a record of plain data. Random weights do for that.

The bandwidth is what Apple publishes for the GPU if it is known, else the speed of reading an array of the same size in
the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from cortexmlx.attention.backends import choose_backend
from cortexmlx.attention.paged import AttentionParams, PagedKV, paged_attention
from cortexmlx.autotune.chooser import Autotuner
from cortexmlx.errors import CortexError
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import DEFAULT_BLOCK_SIZE, AttentionWindow, KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep, PrefillPiece
from cortexmlx.matmul.autotuning import MLX, OURS, matmul_jobs
from cortexmlx.matmul.served import QuantizedMatmuls
from cortexmlx.metal.kernels import KernelFactory
from cortexmlx.metal.prefill import PrefillInputs, PrefillKernel, PrefillVariant
from cortexmlx.metal.work import SMALL, make_prefill_work_list
from cortexmlx.system.machine import gpu_architecture, metal_device
from cortexmlx.types.arrays import dtype_name

ROUNDS = 3
"""Timed runs of each figure, of which the median counts."""

DECODES, BLOCKS = ((1, 4_096), (8, 1_024)), (16, 32, 64, 128)
"""Rows and tokens of each decode step, and the block sizes."""

PIECES = (128, 256, 512, 1_024, 2_048)
"""Tokens of a prefill piece: rows of its matmuls."""

PIECE, CONTEXT, WINDOWS = 512, 4_096, (None, 128, 512, 1_024)
"""Tokens of a piece whose attention is measured, of its text up to its end, and the windows."""

PRODUCT_SECONDS = 5.0
"""How long the matmuls of a model are timed at most."""

BANDWIDTHS = {
    "M1": 68.25,
    "M1 Pro": 200.0,
    "M1 Max": 400.0,
    "M1 Ultra": 800.0,
    "M2": 100.0,
    "M2 Pro": 200.0,
    "M2 Max": 400.0,
    "M2 Ultra": 800.0,
    "M3": 100.0,
    "M3 Pro": 150.0,
    "M3 Max": 400.0,
    "M3 Ultra": 819.0,
    "M4": 120.0,
    "M4 Pro": 273.0,
    "M4 Max": 546.0,
    "M5": 153.0,
    "M5 Pro": 307.0,
    "M5 Max": 614.0,
}
"""GB/s of memory that Apple publishes, for the largest GPU of the name."""

_COLUMNS = 1_024
"""Of an array that is read to measure a bandwidth."""

Record = dict[str, Any]


@dataclass(frozen=True)
class KnownModel:
    """The sizes of a model: its attention, and the first matmul of its MLP."""

    name: str
    kv_heads: int
    group: int
    """Query heads per KV head."""
    dim: int
    hidden: int
    inner: int
    experts: int | None = None

    def make_layer(self) -> nn.Module:
        """Return a layer that computes the model's matmul, with random weights of 4 bits."""
        form = {"bias": False, "group_size": 64, "bits": 4}
        if self.experts is None:
            layer = nn.QuantizedLinear(self.hidden, self.inner, **form)
        else:
            layer = QuantizedSwitchLinear(self.hidden, self.inner, self.experts, **form)
        layer.set_dtype(mx.bfloat16)  # of scales and biases: codes are integers
        mx.eval(layer.parameters())
        return layer


MODELS = (
    KnownModel("Llama 3.2 1B", 8, 4, 64, 2_048, 8_192),
    KnownModel("Qwen3 8B", 8, 4, 128, 4_096, 12_288),
    KnownModel("Qwen3 30B-A3B", 4, 8, 128, 2_048, 768, experts=128),
)


def measure_models(factory: KernelFactory, attention: str, models: tuple[KnownModel, ...] = MODELS) -> Iterator[Record]:
    """Measure every kernel in the sizes of each model, and yield records with times, or with a kernel's error."""
    for model in models:
        for kernel, records in (
            ("decode attention", _measure_decode_attention(model, attention)),
            ("matmul", _measure_matmuls(model, factory)),
            ("prefill attention", _measure_prefill_attention(model, factory)),
        ):
            mx.clear_cache()
            head = {"model": model.name, "kernel": kernel}
            try:
                yield from (head | record for record in records)
            except Exception as error:  # of one kernel: the others tell as much as before
                yield head | {"error": f"{type(error).__name__}: {error}"}


def _make_record(size: int, ours: float | None, theirs: float | None, peak: float, **sizes: int | None) -> Record:
    """Return the record of a kernel that reads and writes `size` bytes. `ours`, `theirs`: seconds, None if unknown."""
    shares = [None if seconds is None else round(size / 1e9 / seconds / peak, 4) for seconds in (ours, theirs)]
    times = {"seconds": ours, "mlx_seconds": theirs, "bandwidth_share": shares[0], "mlx_bandwidth_share": shares[1]}
    return {**sizes, "bytes": size, "peak_gigabytes_per_second": peak, **times}


def find_peak_bandwidth(size: int) -> float:
    """Return the published GB/s (10^9 bytes) of this GPU, or what reading an array of `size` bytes reaches now. Caches
    hold some of the array, as they hold some keys and values.
    """
    name = (metal_device() or "").removeprefix("Apple ")
    if mx.default_device() == mx.gpu and name in BANDWIDTHS:
        return BANDWIDTHS[name]
    numbers = mx.zeros((max(1, size // 4 // _COLUMNS), _COLUMNS), mx.float32)
    row = mx.zeros((1, len(numbers)), mx.float32)
    mx.eval(numbers, row)
    read_functions = (lambda: mx.max(numbers), lambda: row @ numbers)
    return max(numbers.nbytes / 1e9 / seconds_per_call(read) for _ in range(5) for read in read_functions)


def seconds_per_call(*calls: Callable[[], mx.array]) -> float:
    """Evaluate all calls with one wait, and return the seconds per call."""
    started = time.perf_counter()
    mx.eval([make() for make in calls])
    return (time.perf_counter() - started) / len(calls)


def _check_equal(ours: mx.array, theirs: mx.array, kernel: str) -> None:
    """Raise CortexError if the results differ by 0.01 or more."""
    difference = np.abs(np.array(ours, np.float32) - np.array(theirs, np.float32)).max()
    if not difference < 1e-2:
        raise CortexError(f"{kernel} and MLX's attention differ by {difference:.2g}: no figure")


def _measure_decode_attention(model: KnownModel, attention: str) -> Iterator[Record]:
    """Measure decode attention on scattered blocks of each size, beside MLX's on contiguous arrays.

    On a GPU, submitting a call takes longer than the kernel. So there as many calls as read a gigabyte have one wait.
    """
    gpu = mx.default_device() == mx.gpu
    for rows, tokens in DECODES:
        for block in BLOCKS:
            ours, theirs, size = _make_decode_calls(model, rows, tokens, block, attention)
            _check_equal(ours(), theirs(), "paged attention")
            times = max(1, (1 << 30) // size) if gpu else 1
            seconds: dict[Callable[[], mx.array], list[float]] = {ours: [], theirs: []}
            for repetition in range(ROUNDS):
                for call in (ours, theirs) if repetition % 2 == 0 else (theirs, ours):
                    seconds[call].append(seconds_per_call(*[call] * times))
            medians, peak = [median(each) for each in seconds.values()], find_peak_bandwidth(size)
            yield _make_record(size, medians[0], medians[1], peak, rows=rows, tokens=tokens, block_size=block)


def _make_decode_calls(
    model: KnownModel, rows: int, tokens: int, block_size: int, attention: str
) -> tuple[Callable[[], mx.array], Callable[[], mx.array], int]:
    """Return calls of our paged attention and of MLX's with the same queries, keys and values, `[rows, heads, 1, dim]`,
    and the bytes of keys and values. Ours lie in blocks in random order, MLX's are contiguous.
    """
    random, dtype = np.random.default_rng(0), mx.float16 if mx.default_device() == mx.gpu else mx.float32
    blocks = rows * -(-tokens // block_size)
    tables = random.permutation(blocks).astype(np.int32).reshape(rows, -1)
    spec = KVSpec(model.kv_heads, model.dim, model.dim, dtype_name(dtype))
    arena = KVArena([LayerGroup(spec, (0,))], blocks, block_size)
    sizes = (rows, model.kv_heads, tokens, model.dim)
    keys, values = (mx.random.normal(sizes, key=mx.random.key(i)).astype(dtype) for i in (0, 1))
    positions = np.arange(tokens)
    for row, table in enumerate(tables):
        slots = mx.array((table[positions // block_size] * block_size + positions % block_size).astype(np.int32))
        arena.write(0, slots, keys[row], values[row])
        mx.eval(arena.arrays())
    heads, scale = model.kv_heads * model.group, model.dim**-0.5
    queries = mx.random.normal((rows, heads, 1, model.dim), key=mx.random.key(2)).astype(dtype)
    step = GroupStep(tables, np.full(rows, tokens, np.int32), (None,) * rows, (), AttentionWindow())
    kv = PagedKV(arena, 0, step, None, 0, dtype, choose_backend(attention).attend)
    mx.eval(keys, values, queries)
    ours = partial(paged_attention, queries, kv, AttentionParams(scale))
    theirs = partial(mx.fast.scaled_dot_product_attention, queries, keys, values, scale=scale)
    return ours, theirs, 2 * keys.nbytes


def _measure_matmuls(model: KnownModel, factory: KernelFactory) -> Iterator[Record]:
    """Measure quantized matmuls by our kernel beside MLX's, and by MLX alone for one row and for prefill pieces. The
    weights of several layers are used in turns, so that they come from memory as in a step.
    """
    holder = nn.Module()
    holder.layers = [model.make_layer() for _ in range(8 if model.experts is None else 2)]
    matmuls = QuantizedMatmuls(factory, lambda shape, rows: False)
    matmuls.install(holder)
    jobs, chooser = matmul_jobs(matmuls, "bfloat16", gpu_architecture()), Autotuner(None)
    shape = next(iter(jobs))[0]
    peak = find_peak_bandwidth(shape.weight_bytes * len(holder.layers))
    chooser.choose(jobs.values(), seconds=PRODUCT_SECONDS)
    for (_, timed), choice in zip(jobs, chooser.choices(), strict=True):
        size = shape.weight_bytes * min(timed.min_rows, shape.experts or 1)
        times = choice.seconds.get(OURS), choice.seconds.get(MLX)
        sizes = {"rows": timed.max_rows, "timed_rows": timed.min_rows, "experts": shape.experts}
        yield _make_record(size, *times, peak, **sizes) | {"refused": dict(choice.refused)}
    for rows in (1, *PIECES) if shape.experts is None else ():
        x = mx.random.normal((rows, shape.inputs)).astype(mx.bfloat16)
        calls = [partial(layer, x) for layer in holder.layers]
        seconds = [seconds_per_call(*calls) for _ in range(1 + ROUNDS)][1:]
        yield _make_record(shape.weight_bytes, None, median(seconds), peak, rows=rows)


def _measure_prefill_attention(model: KnownModel, factory: KernelFactory) -> Iterator[Record]:
    """Measure the prefill kernel on a piece at the end of a long text, beside MLX's attention to what the piece sees.

    Raises CortexError if the results differ by 0.01 or more.
    """
    dtype = mx.float16 if mx.default_device() == mx.gpu else mx.float32
    name, first, scale = dtype_name(dtype), CONTEXT - PIECE, model.dim**-0.5
    kernel = PrefillKernel(factory)
    variant = PrefillVariant(name, name, model.dim, model.dim, DEFAULT_BLOCK_SIZE, model.group)
    sizes = (model.kv_heads * model.group, PIECE), (model.kv_heads, CONTEXT), (model.kv_heads, CONTEXT)
    queries, keys, values = (mx.random.normal((*size, model.dim)).astype(dtype) for size in sizes)
    flat, factors, sinks = mx.contiguous(queries.swapaxes(0, 1)[:, :, None]), mx.array([scale, 0.0]), mx.zeros(SMALL)
    piece = PrefillPiece(0, PIECE, first, KVHandle(0, CONTEXT // DEFAULT_BLOCK_SIZE), None)
    for window in WINDOWS:
        work = make_prefill_work_list([piece], DEFAULT_BLOCK_SIZE, AttentionWindow(window), variant.tile)
        inputs = PrefillInputs(flat, keys, values, mx.array(work.tables), mx.array(work.plan), factors, sinks)
        oldest = 0 if window is None else max(0, first + 1 - window)
        distance = mx.arange(first, CONTEXT)[:, None] - mx.arange(oldest, CONTEXT)[None]
        mask = "causal" if window is None else (distance >= 0) & (distance < window)
        seen = [mx.contiguous(array[None, :, oldest:]) for array in (keys, values)]
        ours = partial(kernel, variant, work.items, inputs)
        theirs = partial(mx.fast.scaled_dot_product_attention, queries[None], *seen, scale=scale, mask=mask)
        _check_equal(ours()[:, :, 0], theirs()[0].swapaxes(0, 1), "the prefill kernel")
        seconds, mlx_seconds = (median(seconds_per_call(call) for _ in range(ROUNDS)) for call in (ours, theirs))
        size = 2 * queries.nbytes + 2 * seen[0].nbytes
        peak = find_peak_bandwidth(size)
        yield _make_record(size, seconds, mlx_seconds, peak, tokens=PIECE, context=CONTEXT, window=window)
