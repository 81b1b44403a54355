"""The sections of `cortexmlx bench` that need no model: pool, allocator and kernel."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from cortexmlx.bench.measure.machine import Machine
from cortexmlx.bench.measure.yardstick import Yardstick
from cortexmlx.bench.report import memory
from cortexmlx.bench.report.memory import choices as report_choices
from cortexmlx.bench.report.report import Report
from cortexmlx.bench.suites import allocations, choices, kernels, pool

REQUESTS = 600
"""Requests of a recorded trace."""


def measure_pool(block_size: int, repetitions: int, tell: Callable[[str], None]) -> Report:
    """Measure the writing of keys and values into a pool of blocks, and without a pool."""
    machine, yardstick = Machine.here(), Yardstick()
    for _ in range(repetitions):
        yardstick.sample()
    sizes = pool.Sizes(block=block_size)
    part = memory.pool(pool.measure(sizes, repetitions, tell), sizes)
    return Report(machine, None, (part,), yardstick=yardstick.seconds())


def measure_allocator(block_size: int, repetitions: int, seed: int, tell: Callable[[str], None]) -> Report:
    """Measure several allocators on the calls of real schedules."""
    machine = Machine.here()
    tell("allocator: recording")
    found = allocations.traces(seed, block_size, REQUESTS)
    return Report(machine, None, (memory.allocator(allocations.measure(found, repetitions, tell)),))


def measure_kernel(block_size: int, attention: str, repetitions: int, tell: Callable[[str], None]) -> Report:
    """Measure decode attention beside MLX's, and time its ways."""
    machine = Machine.here()
    found, source = kernels.measure(kernels.SHAPES, block_size, attention, repetitions, tell)
    ways = choices.measure(kernels.SHAPES, block_size, attention, tell)
    part = memory.kernel(found, source, mx.default_device() == mx.gpu)
    return Report(machine, None, (part, report_choices(ways)) if ways else (part,))
