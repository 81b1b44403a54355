"""Chooses the backend of `paged_attention`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx

from cortexmlx.attention.choices.decode import ChoosingBackend, ReferenceAttention
from cortexmlx.attention.choices.kernel_ways import KernelChoosing
from cortexmlx.attention.metal import MetalAttention
from cortexmlx.attention.paged import Attend
from cortexmlx.errors import InvalidRequest
from cortexmlx.host.developer_parts import developer_part
from cortexmlx.machine import matrix_units, metal_device


def _in_a_line(note: str) -> str:
    line, more, _ = note.partition("\n")
    return f"{line}; the whole message is in the log" if more else line


def _no_notes() -> tuple[str, ...]:
    return ()


def _nothing() -> None:
    pass


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
    choosing: ChoosingBackend | None = None
    """What may be told which way single tokens take; None: nothing may."""

    def describe(self) -> str:
        """Return the name, the kernels in use and the notes in one line: "metal, matrix kernel"."""
        used = self.kernels()
        name = ", ".join([self.name, *(f"{kernel} kernel" for kernel in used)])
        return "; ".join([name, *(f"reference for {_in_a_line(note)}" for note in self.notes())])


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
        plain = ReferenceAttention()
        return Backend("reference", plain.attend, choosing=plain)
    if name == "metal":
        if metal_device() is None:
            raise InvalidRequest("attention is 'metal', but this machine has no Metal device: use auto or reference")
        attention = MetalAttention(mx.fast.metal_kernel, matrix_units=matrix_units())
        return _of_kernels("metal", attention)
    if name == "sim":
        simulator = developer_part("cortexmlx.metal.sim", "attention='sim'")
        attention = MetalAttention(simulator.metal_kernel, check=False)
        return _of_kernels("sim", attention)
    raise InvalidRequest(f"attention is {name!r}, but must be auto, metal, reference or sim")


def _of_kernels(name: str, attention: MetalAttention) -> Backend:
    choosing = KernelChoosing(attention.ways, attention.decode)
    return Backend(name, attention.attend, attention.notes, attention.reconsider, attention.kernels, choosing=choosing)
