"""The attention backends (metal, reference, simulator), and which one "auto" picks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn

from cortexmlx.attention import reference
from cortexmlx.attention.decode_methods import ReferenceAttention, SelectableBackend, SelectableKernels
from cortexmlx.attention.metal import MetalAttention
from cortexmlx.attention.paged import Attend
from cortexmlx.attention.probe import probe_attention_calls
from cortexmlx.attention.selfcheck import KernelCheck
from cortexmlx.attention.tail_write import TailWriter
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.spec import LayerGroup
from cortexmlx.system.developer_parts import import_developer_part
from cortexmlx.system.machine import metal_device, uses_matrix_units


def _shorten_note(note: str) -> str:
    """Return the first line of a note; if there are more, say that the log has them."""
    line, line_break, _ = note.partition("\n")
    return f"{line}; the whole message is in the log" if line_break else line


def _do_nothing() -> None:
    """Do nothing: the default `reconsider` of a backend."""
    pass


@dataclass(frozen=True)
class AttentionBackend:
    """A named implementation of `paged_attention`, with its kernels' checks and notes."""

    name: str
    attend: Attend
    notes: Callable[[], tuple[str, ...]] = field(default=tuple)
    """Returns what takes the reference path, and why: a line each, perhaps followed by a message of several lines."""
    reconsider: Callable[[], None] = field(default=_do_nothing)
    """Called after a step that failed."""
    kernels: Callable[[], tuple[str, ...]] = field(default=tuple)
    """Returns the names of the kernels that have served."""
    checks: Callable[[nn.Module, Sequence[LayerGroup], int], Sequence[KernelCheck]] = field(default=lambda *_: ())
    """`checks(model, groups, block_size)` returns what must be compiled and checked before a model's first step: one
    check for each kernel variant that it can need. The model must have been probed.
    """
    writer: TailWriter | None = None
    """Writes decode steps into the tail; None: MLX's own operations do."""
    selectable: SelectableBackend | None = None
    """What may be told which method single tokens take; None: nothing may. Then its `attend` takes the place of this
    one.
    """
    by_kernels: MetalAttention | None = None
    """The attention whose prefill pieces a kernel or MLX computes, as timing says; None for a backend without kernels.
    """

    def describe(self) -> str:
        """Return the name, the kernels in use and the notes as one line, such as "metal, matrix kernel"."""
        kernel_names = self.kernels()
        name = ", ".join([self.name, *(f"{kernel} kernel" for kernel in kernel_names)])
        return "; ".join([name, *(f"reference for {_shorten_note(note)}" for note in self.notes())])


def kernel_backend(name: str, attention: MetalAttention, writer: TailWriter | None = None) -> AttentionBackend:
    """Return a backend called `name` that computes by the kernels of `attention`, and writes tails by `writer`."""

    def checks(model: nn.Module, groups: Sequence[LayerGroup], block_size: int) -> Sequence[KernelCheck]:
        return attention.kernel_checks(probe_attention_calls(model), groups, block_size)

    def notes() -> tuple[str, ...]:
        return attention.notes() + (() if writer is None else writer.notes())

    def reconsider() -> None:
        attention.reconsider()
        if writer is not None:
            writer.reconsider()

    selectable = SelectableKernels(attention.methods, attention.attend, attention.decode)
    return AttentionBackend(
        name, attention.attend, notes, reconsider, attention.used_kernels, checks, writer, selectable, attention
    )


def auto_backend_name() -> str:
    """Return the backend that "auto" means here: "metal" on an Apple GPU, otherwise "reference"."""
    return "metal" if metal_device() is not None and mx.default_device() == mx.gpu else "reference"


def choose_backend(name: str) -> AttentionBackend:
    """Return the backend called `name`; "auto" picks one for this machine. Raises InvalidRequest for an unknown name,
    for "metal" without a Metal device, and for "sim" without the simulator.
    """
    if name == "auto":
        name = auto_backend_name()
    if name == "reference":
        return AttentionBackend("reference", reference.attend, selectable=ReferenceAttention())
    if name == "metal":
        if metal_device() is None:
            raise InvalidRequest("attention is 'metal', but this machine has no Metal device: use auto or reference")
        attention = MetalAttention(mx.fast.metal_kernel, matrix_units=uses_matrix_units())
        return kernel_backend(name, attention, TailWriter(mx.fast.metal_kernel))
    if name == "sim":
        simulator = import_developer_part("cortexmlx.metal.lab.sim", "attention='sim'")
        attention = MetalAttention(simulator.metal_kernel, check=False)
        return kernel_backend(name, attention, TailWriter(simulator.metal_kernel, check=False))
    raise InvalidRequest(f"attention is {name!r}, but must be auto, metal, reference or sim")
