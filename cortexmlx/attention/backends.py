"""Chooses the backend of `paged_attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn

from cortexmlx.attention import reference
from cortexmlx.attention.decode_methods import ChoosingBackend, KernelChoosing, ReferenceAttention
from cortexmlx.attention.metal import MetalAttention
from cortexmlx.attention.paged import Attend
from cortexmlx.attention.probe import attention_calls
from cortexmlx.attention.selfcheck import KernelCheck
from cortexmlx.attention.tail_write import TailWriter
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.spec import LayerGroup
from cortexmlx.system.developer_parts import developer_part
from cortexmlx.system.machine import matrix_units, metal_device


def _in_a_line(note: str) -> str:
    line, more, _ = note.partition("\n")
    return f"{line}; the whole message is in the log" if more else line


def _no_notes() -> tuple[str, ...]:
    return ()


def _nothing() -> None:
    pass


def _no_checks(model: nn.Module, groups: Sequence[LayerGroup], block_size: int) -> tuple[KernelCheck, ...]:
    return ()


@dataclass(frozen=True)
class Backend:
    """A named implementation of `paged_attention`."""

    name: str
    attend: Attend
    notes: Callable[[], tuple[str, ...]] = field(default=_no_notes)
    """Returns what takes the reference path, and why: a line each, perhaps followed by a message of several lines."""
    reconsider: Callable[[], None] = field(default=_nothing)
    """Called after a step that failed."""
    kernels: Callable[[], tuple[str, ...]] = field(default=_no_notes)
    """Returns the names of the kernels that have served."""
    checks: Callable[[nn.Module, Sequence[LayerGroup], int], Sequence[KernelCheck]] = field(default=_no_checks)
    """`checks(model, groups, block_size)` returns what must be compiled and checked before a model's first step: one
    check for each kernel variant that it can need. The model must have been probed.
    """
    writer: TailWriter | None = None
    """Writes decode steps into the tail; None: MLX's own operations do."""
    choosing: ChoosingBackend | None = None
    """What may be told which method single tokens take; None: nothing may. Then its `attend` takes the place of this
    one.
    """

    def describe(self) -> str:
        """Return the name, the kernels in use and the notes in one line: "metal, matrix kernel"."""
        used = self.kernels()
        name = ", ".join([self.name, *(f"{kernel} kernel" for kernel in used)])
        return "; ".join([name, *(f"reference for {_in_a_line(note)}" for note in self.notes())])


def kernel_backend(name: str, attention: MetalAttention, writer: TailWriter | None = None) -> Backend:
    """Return the backend called `name` on the kernels of `attention` and `writer`."""

    def checks(model: nn.Module, groups: Sequence[LayerGroup], block_size: int) -> Sequence[KernelCheck]:
        return attention.checks(attention_calls(model), groups, block_size)

    def notes() -> tuple[str, ...]:
        return attention.notes() + (() if writer is None else writer.notes())

    def reconsider() -> None:
        attention.reconsider()
        if writer is not None:
            writer.reconsider()

    choosing = KernelChoosing(attention.methods, attention.attend, attention.decode)
    return Backend(name, attention.attend, notes, reconsider, attention.kernels, checks, writer, choosing)


def automatic() -> str:
    """Return what "auto" means here: "metal" if MLX computes on an Apple GPU, otherwise "reference"."""
    return "metal" if metal_device() is not None and mx.default_device() == mx.gpu else "reference"


def choose_backend(name: str) -> Backend:
    """Return the backend called `name`. "auto" picks one for this machine. Raises InvalidRequest for an unknown name,
    for "metal" without a Metal device, and for "sim" without the simulator.
    """
    if name == "auto":
        name = automatic()
    if name == "reference":
        return Backend("reference", reference.attend, choosing=ReferenceAttention())
    if name == "metal":
        if metal_device() is None:
            raise InvalidRequest("attention is 'metal', but this machine has no Metal device: use auto or reference")
        attention = MetalAttention(mx.fast.metal_kernel, matrix_units=matrix_units())
        return kernel_backend(name, attention, TailWriter(mx.fast.metal_kernel))
    if name == "sim":
        simulator = developer_part("cortexmlx.metal.lab.sim", "attention='sim'")
        attention = MetalAttention(simulator.metal_kernel, check=False)
        return kernel_backend(name, attention, TailWriter(simulator.metal_kernel, check=False))
    raise InvalidRequest(f"attention is {name!r}, but must be auto, metal, reference or sim")
