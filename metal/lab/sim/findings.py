"""Findings as sentences: kernel, buffer and index, threads, and the line of the text."""

import re
from collections.abc import Sequence
from pathlib import Path

from cortexmlx.metal.lab.sim import abi
from cortexmlx.metal.lab.sim.buffers import BufferSpec, LaunchSpec
from cortexmlx.metal.lab.sim.lines import line_of
from cortexmlx.metal.lab.sim.report import BufferReport, Fault, Finding

# The runtime names a threadgroup array by the type alias from cpp.py.
_ARRAY_TYPE = re.compile(r"'sim_type_\w+' \(aka ('[^']*')\)")


def _thread_text(group: Sequence[int], thread: Sequence[int]) -> str:
    return f"thread {tuple(thread)} of threadgroup {tuple(group)}"


def _simdgroup_of(thread: Sequence[int], threadgroup: Sequence[int]) -> int:
    return (thread[0] + threadgroup[0] * (thread[1] + threadgroup[1] * thread[2])) // 32


def _argument_text(value: int) -> str:
    """Return a shuffle's lane, mask or delta as text, with the modulo of a shuffle-and-fill."""
    return f"{value & 0xFFFF}" + (f" (modulo {value >> 16})" if value >> 16 else "")


def _place_text(buffers: Sequence[BufferSpec], launch: abi.Launch, f: abi.Finding) -> str:
    """Return the place of a finding in memory as text, such as `element 12 of 'k' (10 elements of 4 bytes)`."""
    if f.buffer >= 0:
        spec = buffers[f.buffer]
        count = spec.nbytes // spec.item_bytes
        return f"element {f.offset // spec.item_bytes} of '{spec.name}' ({count} elements of {spec.item_bytes} bytes)"
    if f.array >= 0:
        array = launch.arrays[f.array]
        return f"byte {f.offset} of threadgroup memory '{array.name.decode()}' ({array.bytes} bytes)"
    return _ARRAY_TYPE.sub(r"\1", f.text.decode())


def _quote_line(text: str, line: int | None) -> str:
    """Return a line in the form ` (line 7: "x[i] = y;")`, or an empty text if it is not known."""
    lines = text.splitlines()
    if line is None or line > len(lines):
        return ""
    return f' (line {line}: "{lines[line - 1].strip()[:90]}")'


def lane_names(mask: int) -> str:
    """Return the lanes in a mask of 32 bits as text, such as `lanes 0-7, 9`."""
    lanes = [lane for lane in range(32) if mask >> lane & 1]
    runs: list[list[int]] = []
    for lane in lanes:
        if runs and lane == runs[-1][-1] + 1:
            runs[-1].append(lane)
        else:
            runs.append([lane])
    if len(runs) > 6:
        return f"{len(lanes)} lanes (mask {mask:#010x})"
    names = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"lane{'s' * (len(lanes) > 1)} {names}"


def make_finding(dispatch: LaunchSpec, library: Path, launch: abi.Launch, f: abi.Finding) -> Finding:
    """Return the Finding of a runtime's record `f`. Its line number counts in the kernel's text."""
    fault = Fault.DIVERGENT if f.kind == abi.NOTE_DIVERGENT else Fault(f.kind)
    lanes = None
    line = f.line or (line_of(library, f.pc) if f.pc else None)
    who = _thread_text(f.group, f.thread)
    other = _thread_text(f.other_group, f.other_thread)
    place = _place_text(dispatch.buffers, launch, f)
    does = "writes" if f.is_write else "reads"
    if fault is Fault.OUT_OF_BOUNDS:
        said = f"{who} {does} {f.size} bytes outside: {place}" if f.size else f"{who} uses {place}"
    elif fault is Fault.WRITE_TO_INPUT:
        said = f"{who} writes to an input: {place}"
    elif fault is Fault.UNINITIALISED:
        said = f"{who} reads {place}, which nothing has written"
    elif fault is Fault.RACE:
        before = "wrote" if f.other_state else "read"
        said = f"race: {who} {does} {place}, which {other} {before} with no barrier between them"
    elif fault is Fault.BARRIER_DIVERGENCE:
        where = "has returned" if f.other_state else "waits or runs elsewhere"
        said = f"{who} waits at a {f.text.decode()} that {other} does not reach: it {where}"
    elif fault is Fault.INACTIVE_LANE:
        said = f"{who} takes a value from lane {f.other_state}, which takes no part in the simdgroup operation"
    elif fault is Fault.THREADGROUP_MEMORY:
        said = f"{f.offset} bytes of threadgroup memory, at most 32768 are there"
    elif fault is Fault.DIVERGENT:
        lanes = (f.offset & 0xFFFFFFFF, f.offset >> 32 & 0xFFFFFFFF)
        there, elsewhere = map(lane_names, lanes)
        said = (
            f"simdgroup {_simdgroup_of(f.thread, launch.threadgroup)} of threadgroup {tuple(f.group)}: {there} meet in "
            f"'{abi.SIMD_OPS[f.size]}' without {elsewhere}, elsewhere in the program or at its end"
        )
    elif fault is Fault.NOT_UNIFORM:
        said = (
            f"{who} gives '{abi.SIMD_OPS[f.size]}' {_argument_text(f.offset)}, {other} gives it "
            f"{_argument_text(f.other_state)}: it must be the same in all lanes"
        )
    elif fault is Fault.ENDLESS:
        said = (
            f"{who} runs and no thread has come to its end for {f.text.decode()} s of processor time: an endless loop, "
            "or a wait for what another thread has yet to store (only barriers and simdgroup operations let others run)"
        )
    else:
        said = f"{who}: {f.text.decode()}"
    times = f", {f.count} times" if f.count > 1 else ""
    return Finding(fault, f"{dispatch.kernel}: {said}{times}{_quote_line(dispatch.text, line)}", f.count, line, lanes)


def limit_finding(kernel: str, said: str) -> Finding:
    """Return the finding of a launch that no Apple GPU accepts."""
    return Finding(Fault.LIMITS, f"{kernel}: {said}")


def unwritten_finding(kernel: str, spec: BufferSpec, report: BufferReport) -> Finding:
    """Return the finding of an output with elements that no thread wrote."""
    count = spec.nbytes // spec.item_bytes
    missing, first = report.unwritten_elements, report.first_unwritten
    said = f"{missing} of {count} elements of output '{spec.name}' are never written, the first is {first}"
    return Finding(Fault.UNWRITTEN, f"{kernel}: {said}", report.unwritten_elements)
