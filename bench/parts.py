"""Measures the parts of the engine that need no model: the KV pool and the attention kernel."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from cortexmlx.bench.measure.machine import BenchMachine
from cortexmlx.bench.measure.yardstick import Yardstick
from cortexmlx.bench.report import memory
from cortexmlx.bench.report.memory import choices_section as report_choices
from cortexmlx.bench.report.report import Report
from cortexmlx.bench.suites import choices, kernels, pool


def measure_pool(block_size: int, repetitions: int, on_run: Callable[[str], None]) -> Report:
    """Measure how fast keys and values are written into a pool of blocks, and without a pool."""
    machine, yardstick = BenchMachine.detect(), Yardstick()
    for _ in range(repetitions):
        yardstick.add_sample()
    sizes = pool.PoolSizes(block=block_size)
    part = memory.pool_section(pool.measure_writers(sizes, repetitions, on_run), sizes)
    return Report(machine, None, (part,), yardstick=yardstick.all_seconds())


def measure_kernel(block_size: int, attention: str, repetitions: int, on_run: Callable[[str], None]) -> Report:
    """Measure our decode attention beside MLX's, and time the candidates of autotuning."""
    machine = BenchMachine.detect()
    speeds, source = kernels.measure_kernels(kernels.SHAPES, block_size, attention, repetitions, on_run)
    timed_choices = choices.time_attention(kernels.SHAPES, block_size, attention, on_run)
    part = memory.kernel_section(speeds, source, mx.default_device() == mx.gpu)
    return Report(machine, None, (part, report_choices(timed_choices)) if timed_choices else (part,))
