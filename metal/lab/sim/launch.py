"""Run a built kernel: place buffers in simulated device memory, call the runtime once, read the counters."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cortexmlx.errors import KernelFault
from cortexmlx.metal.lab.sim import abi
from cortexmlx.metal.lab.sim.buffers import MAX_THREADS, STACK_BYTES, BufferSpec, LaunchSpec, device_memory
from cortexmlx.metal.lab.sim.findings import limit_finding, make_finding, unwritten_finding
from cortexmlx.metal.lab.sim.report import BufferReport, Fault, Finding, LaunchReport
from cortexmlx.metal.lab.sim.settings import SimSettings, record
from cortexmlx.metal.lab.sim.toolchain import load

MAX_BUFFERS = 31
SENTINEL = 0xFF


@dataclass(frozen=True)
class LaunchResult:
    """The bytes of each writable buffer, in order, and the report."""

    outputs: tuple[npt.NDArray[np.uint8], ...]
    report: LaunchReport


def _limit_findings(of: LaunchSpec) -> list[Finding]:
    found = []
    threads = of.threadgroup[0] * of.threadgroup[1] * of.threadgroup[2]
    if threads > MAX_THREADS:
        said = f"{threads} threads in a threadgroup {of.threadgroup}, at most {MAX_THREADS} fit"
        found.append(limit_finding(of.kernel, said))
    if len(of.buffers) > MAX_BUFFERS:
        found.append(limit_finding(of.kernel, f"{len(of.buffers)} buffers, at most {MAX_BUFFERS} can be bound"))
    return found


def run(dispatch: LaunchSpec, library: Path, settings: SimSettings, zeroed: Path | None = None) -> LaunchResult:
    """Execute every thread and return the writable buffers and the report.

    `library` is built from the kernel's text. `zeroed`, if given, is built from the same text with zeros in
    uninitialised variables: a launch without a fault runs again with it, and the outputs are compared.

    Raises:
        KernelFault: the grid is empty, the launch exceeds a limit of the GPU, or it did something undefined that
            `settings.allow` does not list.
    """
    launched = _execute(dispatch, library, settings)
    found = [*launched.report.findings]
    blurred = {Fault.UNWRITTEN, Fault.UNINITIALISED} & {f.fault for f in found}
    sentence = None
    if not blurred and all(f.fault in settings.allow for f in found):
        sentence = find_poison(dispatch.buffers, launched.outputs) if settings.checked else None
        if zeroed and not sentence:
            again = _execute(dispatch, zeroed, replace(settings, checked=False))
            sentence = find_difference(dispatch.buffers, launched.outputs, again.outputs)
    if sentence:
        found.append(Finding(Fault.UNINITIALISED, f"{dispatch.kernel}: {sentence}"))
    launched = replace(launched, report=replace(launched.report, findings=tuple(found)))
    record(launched.report)
    serious = [f for f in found if f.fault not in settings.allow]
    if serious:
        raise KernelFault("\n".join(map(str, serious[:8])))
    return launched


def _execute(dispatch: LaunchSpec, library: Path, settings: SimSettings) -> LaunchResult:
    grid, threadgroup, buffers = dispatch.grid, dispatch.threadgroup, dispatch.buffers
    if min(grid) < 1 or min(threadgroup) < 1:
        raise KernelFault(
            f"{dispatch.kernel}: grid {grid} and threadgroup {threadgroup} must be at least 1 in each dimension"
        )
    threadgroup = (min(grid[0], threadgroup[0]), min(grid[1], threadgroup[1]), min(grid[2], threadgroup[2]))
    if found := _limit_findings(replace(dispatch, threadgroup=threadgroup)):
        raise KernelFault("\n".join(map(str, found)))
    memory = device_memory()
    with memory.lock:
        table = (abi.Buffer * len(buffers))()
        for slot, spec in enumerate(buffers):
            base = memory.place(slot) + spec.offset
            entry = table[slot]
            entry.base, entry.bytes, entry.item_bytes, entry.start = base, spec.nbytes, spec.item_bytes, spec.start
            entry.writable, entry.tracked = spec.writable, spec.writable and spec.data is None
            if spec.data is None and not spec.writable:
                memory.release(slot, spec.nbytes)
            for offset, piece in spec.pieces:
                ctypes.memmove(base + offset, piece.ctypes.data, piece.nbytes)
            if spec.data is None and spec.writable:
                ctypes.memset(base, SENTINEL, spec.nbytes)
            elif spec.data is not None and spec.nbytes:
                ctypes.memmove(base, spec.data.ctypes.data, spec.nbytes)
        launch = abi.Launch()
        launch.grid[:], launch.threadgroup[:] = grid, threadgroup
        launch.seed, launch.checked, launch.coalescing = settings.seed, settings.checked, settings.coalescing
        launch.patience = settings.patience
        launch.fast_errors = settings.fast_errors
        launch.buffer_count, launch.stack_bytes = len(buffers), STACK_BYTES
        launch.stacks, launch.arena, launch.buffers = memory.stacks, memory.arena, ctypes.addressof(table)
        load(library).sim_launch(ctypes.byref(launch))
        outputs = tuple(
            np.frombuffer(ctypes.string_at(table[slot].base, spec.nbytes), dtype=np.uint8)
            for slot, spec in enumerate(buffers)
            if spec.writable
        )
        for slot, spec in enumerate(buffers):
            memory.release(slot, spec.nbytes)
    return LaunchResult(outputs, _make_report(dispatch, library, table, launch, settings))


def _make_report(
    dispatch: LaunchSpec, library: Path, table: ctypes.Array[abi.Buffer], launch: abi.Launch, settings: SimSettings
) -> LaunchReport:
    reports = {}
    for spec, entry in zip(dispatch.buffers, table, strict=True):
        counters = {name: int(getattr(entry.counters, name)) for name, _ in abi.BufferCounters._fields_}
        reports[spec.name] = BufferReport(name=spec.name, bytes=spec.nbytes, **counters)
    found = [launch.findings[i] for i in range(launch.finding_count)]
    findings, notes = (
        [make_finding(dispatch, library, launch, f) for f in found if (f.kind == abi.NOTE_DIVERGENT) == noted]
        for noted in (False, True)
    )
    if not launch.aborted:
        findings += [
            unwritten_finding(dispatch.kernel, spec, reports[spec.name])
            for spec in dispatch.buffers
            if reports[spec.name].unwritten_elements
        ]
    return LaunchReport(
        kernel=dispatch.kernel,
        grid=tuple(launch.grid),
        threadgroup=tuple(launch.threadgroup),
        checked=settings.checked,
        threadgroups=launch.threadgroups,
        threads=launch.threads,
        barriers=launch.barriers,
        divergent_simd_ops=launch.divergent_ops,
        benign_races=launch.benign_races,
        threadgroup_memory=launch.threadgroup_bytes,
        buffers=reports,
        findings=tuple(findings),
        notes=tuple(notes),
    )


# Outputs that were computed from uninitialised variables. An uninitialised float starts as the NaN whose bits are all
# ones. No operation creates this NaN, and arithmetic does not change it: an output that holds it was computed from such
# a variable. Comparisons, `max` and integers hide it. A second run, in which such variables are zeros, finds those.

_FLOATS = ("float32", "float16", "bfloat16")
Bytes = npt.NDArray[np.uint8]


def _as_unsigned(data: Bytes, item_bytes: int) -> npt.NDArray[np.unsignedinteger]:
    whole = item_bytes in (1, 2, 4, 8) and data.size % item_bytes == 0
    return data.view(f"u{item_bytes if whole else 1}")


def _is_poison(data: Bytes, item_bytes: int) -> npt.NDArray[np.bool_]:
    """Return which floats are the NaN whose bits are all ones. Its sign is ignored, because a negation changes it."""
    bits = _as_unsigned(data, item_bytes)
    found: npt.NDArray[np.bool_] = (bits << 1) == np.array(-2).astype(bits.dtype)
    return found


def _comparable_values(data: Bytes, spec: BufferSpec) -> npt.NDArray[np.generic]:
    """Return numbers that compare as the elements do: -0 equals 0, and no NaN equals another."""
    bits = _as_unsigned(data, spec.item_bytes)
    if spec.element == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(f"f{spec.item_bytes}") if spec.element in _FLOATS else bits


def _uninitialised_text(spec: BufferSpec, found: npt.NDArray[np.bool_], total: int) -> str:
    first = int(np.flatnonzero(found)[0])
    return (
        f"{int(found.sum())} of {total} elements of output '{spec.name}' have been computed from a variable that "
        f"nothing has written, the first is {first}"
    )


def _writable_buffers(buffers: Sequence[BufferSpec]) -> list[BufferSpec]:
    return [spec for spec in buffers if spec.writable]


def find_poison(buffers: Sequence[BufferSpec], outputs: Sequence[Bytes]) -> str | None:
    """Return a sentence about the first output with the NaN of uninitialised variables; None if an input has it too."""
    for spec, data in zip(_writable_buffers(buffers), outputs, strict=True):
        if spec.element in _FLOATS and (found := _is_poison(data, spec.item_bytes)).any():
            given = (b.data for b in buffers if b.data is not None and b.element in _FLOATS)
            if not any(_is_poison(np.ascontiguousarray(d).view(np.uint8), d.itemsize).any() for d in given):
                return _uninitialised_text(spec, found, found.size)
    return None


def find_difference(buffers: Sequence[BufferSpec], outputs: Sequence[Bytes], others: Sequence[Bytes]) -> str | None:
    """Return a sentence about the first output that differs in `others`, where uninitialised variables were zeros."""
    for spec, data, other in zip(_writable_buffers(buffers), outputs, others, strict=True):
        one, two = _comparable_values(data, spec), _comparable_values(other, spec)
        found = (one != two) & ~((one != one) & (two != two))
        if found.any():
            return _uninitialised_text(spec, found, found.size)
    return None
