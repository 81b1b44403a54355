"""Kernel factories that fail in the ways in which a GPU does, around the simulator's kernels that are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from cortexmlx.metal.lab import sim

COMPILE_ERROR = """[metal::Device] Unable to build metal library from source
program_source:9:3: warning: unused variable 'n' [-Wunused-variable]
  int n = 0;
      ^
program_source:412:14: error: cannot initialize a variable of type 'device float *' with an rvalue of type \
'threadgroup float *'
  device float* out = outputs;
                ^     ~~~~~~~
program_source:77:1: note: in instantiation of function template 'paged_decode<half>' requested here
"""
"""What MLX raises for a kernel that does not compile: its own line, which is always the same, then Apple's."""

TOO_MANY_THREADS = "Thread group size (384) is greater than  the maximum allowed threads per threadgroup (320)."
GPU_TIMEOUT = "[METAL] Command buffer execution failed: Caused GPU Timeout Error (00000002)."

Call = Callable[..., list[mx.array]]
Break = Callable[[Call, dict[str, Any]], list[mx.array]]


def broken(how: Break, only: str = "cortex_") -> Any:
    """A factory whose kernels with `only` in their name do what `how(kernel, call)` does; the others are right."""

    def factory(**options: Any) -> Any:
        kernel = sim.metal_kernel(**options)
        return (lambda **call: how(kernel, call)) if only in options["name"] else kernel

    return factory


def damaged(damage: Callable[[mx.array], mx.array], only: str = "cortex_") -> Any:
    """Kernels whose results are damaged."""
    return broken(lambda kernel, call: [damage(a) for a in kernel(**call)], only)


def raising(error: Exception, only: str = "cortex_") -> Any:
    """Kernels that raise."""

    def how(kernel: Call, call: dict[str, Any]) -> list[mx.array]:
        raise error

    return broken(how, only)


def dropped(only: str, *, zeros: bool = False) -> Any:
    """Kernels whose launch never happens: their outputs stay as MLX initialised them, or (`zeros`) as the system gave
    the memory.
    """

    def how(kernel: Call, call: dict[str, Any]) -> list[mx.array]:
        left = 0.0 if zeros or call.get("init_value") is None else call["init_value"]
        return [mx.full(s, left, d) for s, d in zip(call["output_shapes"], call["output_dtypes"], strict=True)]

    return broken(how, only)


def copying(*, all_inputs: bool) -> Any:
    """Kernels that read copies of their inputs: of all, or, as MLX makes them by default, of those that do not lie in
    memory row by row.
    """

    def factory(**options: Any) -> Any:
        kernel = sim.metal_kernel(**options | {"ensure_row_contiguous": True})

        def call(*, inputs: list[mx.array], **others: Any) -> Any:
            return kernel(inputs=[i.reshape(-1)[mx.arange(i.size)].reshape(i.shape) for i in inputs], **others)

        return call if all_inputs else kernel

    return factory
