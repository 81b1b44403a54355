"""A CPU computes the layers of a step that are built while the others are being built.

On a CPU, MLX's `async_eval` lets only a few operations wait: it returns when nearly all of what it was given is
computed. A step that is handed over as a whole thus leaves the CPU idle while the next one is built, which for a small
model is a sixth of the time. Handed over layer by layer, it is idle for the first layer only.

A GPU is given whole steps ahead, and cutting them would only cost: there nothing is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx


class Feed:
    """Call it with arrays of a step while the step is being built. `waited` is the seconds that this took: the CPU was
    at work meanwhile. `hand_over` is who computes them.
    """

    def __init__(self) -> None:
        self.on = mx.default_device() == mx.cpu
        self.waited = 0.0
        self.hand_over: Callable[[tuple[mx.array, ...]], object] = mx.async_eval

    def __call__(self, *arrays: mx.array) -> None:
        """Begin to compute arrays. The caller must not hold any other that the CPU is meant to overwrite."""
        if not self.on:
            return
        started = time.perf_counter()
        self.hand_over(arrays)
        self.waited += time.perf_counter() - started
