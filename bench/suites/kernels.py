"""Measures decode attention alone: our paged kernel on scattered blocks, and MLX's kernel on contiguous keys and
values.

Reading keys and values limits both. So a figure is GB/s of keys and values, and its share of the memory's peak. The
peak is the published bandwidth of the GPU if it is known, else the speed of reading an array of that size in the same
run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from cortexmlx.attention.backends import choose_backend
from cortexmlx.attention.paged import AttentionParams, PagedKV, paged_attention
from cortexmlx.errors import CortexError
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import AttentionWindow, KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep
from cortexmlx.system.machine import metal_device

OURS, THEIRS = "cortexmlx", "MLX"
_COLUMNS = 1_024

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


@dataclass(frozen=True)
class KernelShape:
    """A decode attention to measure: `rows` rows that each attend to `tokens` tokens, with these heads."""

    rows: int
    tokens: int
    kv_heads: int = 8
    group: int = 4
    """Query heads per KV head."""
    dim: int = 128

    @property
    def name(self) -> str:
        """The shape's name in the table."""
        return f"{self.rows} x {self.tokens:,} tokens"


SHAPES = (KernelShape(1, 4_096), KernelShape(8, 1_024), KernelShape(16, 1_024))


@dataclass(frozen=True)
class KernelSpeed:
    """The speed of a kernel on a shape: GB/s (10^9 bytes) of keys and values for each repetition, and peak memory."""

    shape: KernelShape
    kernel: str
    rates: tuple[float, ...]
    peak: float
    bytes: int = 0
    """Bytes of keys and values that a call reads."""


@dataclass(frozen=True)
class PeakBandwidth:
    """The most GB/s that the memory reaches, and the source of the figure."""

    rate: float
    source: str


def find_peak_bandwidth(size: int) -> PeakBandwidth:
    """Return the published bandwidth of this GPU, or what reading an array of `size` bytes reaches now. Caches hold
    some of the array, as they hold some keys and values.
    """
    name = (metal_device() or "").removeprefix("Apple ")
    if mx.default_device() == mx.gpu and name in BANDWIDTHS:
        return PeakBandwidth(BANDWIDTHS[name], f"published for the {name}")
    numbers = mx.zeros((max(1, size // 4 // _COLUMNS), _COLUMNS), mx.float32)
    row = mx.zeros((1, len(numbers)), mx.float32)
    mx.eval(numbers, row)
    read_functions = (lambda: mx.max(numbers), lambda: row @ numbers)
    max_rate = max(numbers.nbytes / 1e9 / seconds_per_call(read) for _ in range(5) for read in read_functions)
    return PeakBandwidth(max_rate, "what reading an array of that size reaches in this run")


def seconds_per_call(*calls: Callable[[], mx.array]) -> float:
    """Return the seconds per evaluation, for the evaluation of all calls with one wait."""
    started = time.perf_counter()
    mx.eval([make() for make in calls])
    return (time.perf_counter() - started) / len(calls)


class KernelInputs:
    """The same queries, keys and values for both kernels: in blocks in random order, and contiguous."""

    def __init__(self, shape: KernelShape, block_size: int, dtype: mx.Dtype, attention: str) -> None:
        random = np.random.default_rng(0)
        blocks = shape.rows * -(-shape.tokens // block_size)
        tables = random.permutation(blocks).astype(np.int32).reshape(shape.rows, -1)
        spec = KVSpec(shape.kv_heads, shape.dim, shape.dim, str(dtype).removeprefix("mlx.core."))
        arena = KVArena([LayerGroup(spec, (0,))], blocks, block_size)
        sizes = (shape.rows, shape.kv_heads, shape.tokens, shape.dim)
        self._keys, self._values = (mx.random.normal(sizes, key=mx.random.key(i)).astype(dtype) for i in (0, 1))
        positions = np.arange(shape.tokens)
        for row, table in enumerate(tables):
            slots = mx.array((table[positions // block_size] * block_size + positions % block_size).astype(np.int32))
            arena.write(0, slots, self._keys[row], self._values[row])
            mx.eval(arena.arrays())
        heads = shape.kv_heads * shape.group
        self._queries = mx.random.normal((shape.rows, heads, 1, shape.dim), key=mx.random.key(2)).astype(dtype)
        lengths = np.full(shape.rows, shape.tokens, np.int32)
        step = GroupStep(tables, lengths, (None,) * shape.rows, (), AttentionWindow())
        self._kv = PagedKV(arena, 0, step, None, 0, dtype, choose_backend(attention).attend)
        self._scale = shape.dim**-0.5
        self.bytes = 2 * self._keys.nbytes
        mx.eval(self._keys, self._values, self._queries)

    def attend_paged(self) -> mx.array:
        """Return our paged attention, `[rows, heads, 1, dim]`."""
        return paged_attention(self._queries, self._kv, AttentionParams(self._scale))

    def attend_contiguous(self) -> mx.array:
        """Return MLX's attention, of the same shape."""
        return mx.fast.scaled_dot_product_attention(self._queries, self._keys, self._values, scale=self._scale)

    def check(self) -> None:
        """Raise CortexError unless the results of both kernels differ by less than 0.01."""
        difference = float(
            np.abs(np.array(self.attend_paged(), np.float32) - np.array(self.attend_contiguous(), np.float32)).max()
        )
        if not difference < 1e-2:
            raise CortexError(
                f"paged attention and MLX's differ by {difference:.2g}: no figure. See `cortexmlx doctor`"
            )


def measure_kernels(
    shapes: Sequence[KernelShape], block_size: int, attention: str, repetitions: int, on_run: Callable[[str], None]
) -> tuple[list[KernelSpeed], str]:
    """Run both kernels on every shape, in turns. Return their speeds, and the source of their peaks.

    On a GPU, submitting a call takes longer than the kernel. So there as many calls as read a gigabyte have one wait.
    On a CPU each call has a wait of its own.
    """
    gpu = mx.default_device() == mx.gpu
    dtype, speeds = mx.float16 if gpu else mx.float32, []
    for shape in shapes:
        problem = KernelInputs(shape, block_size, dtype, attention)
        problem.check()
        times = max(1, (1 << 30) // problem.bytes) if gpu else 1
        peak = find_peak_bandwidth(problem.bytes)
        rates: dict[str, list[float]] = {OURS: [], THEIRS: []}
        for repetition in range(repetitions):
            kernel_calls = [(OURS, problem.attend_paged), (THEIRS, problem.attend_contiguous)]
            for name, make in kernel_calls if repetition % 2 == 0 else kernel_calls[::-1]:
                on_run(f"kernel, run {repetition + 1} of {repetitions}: {name}, {shape.name}")
                rates[name].append(problem.bytes / 1e9 / seconds_per_call(*[make] * times))
        speeds += [KernelSpeed(shape, name, tuple(values), peak.rate, problem.bytes) for name, values in rates.items()]
    return speeds, peak.source
