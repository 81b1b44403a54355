"""A small Metal host: runs a `[[kernel]]` function from header files, with buffers by index and function constants.

`mx.fast.metal_kernel` writes a kernel's signature itself. MLX's built-in kernels have their own, and this module reads
it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.errors import KernelCompileError
from cortexmlx.metal.lab.legal.msl import (
    FUNCTION_CONSTANT,
    INCLUDE,
    KERNEL_FOLDER,
    PARAMETER,
    PREAMBLE,
    UTILS,
    blank_comments,
    find_closing_bracket,
    split_at_commas,
)
from cortexmlx.metal.lab.sim import settings
from cortexmlx.metal.lab.sim.buffers import BufferSpec, LaunchSpec, Triple
from cortexmlx.metal.lab.sim.cpp import attribute_value, entry_point, to_cpp
from cortexmlx.metal.lab.sim.launch import LaunchResult, run
from cortexmlx.metal.lab.sim.toolchain import SHIM, Build, build, mlx_headers


@dataclass(frozen=True)
class ResultArray:
    """A buffer that the kernel fills. `before` is its content before the launch; None if undefined."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    before: npt.NDArray[np.generic] | None = None


def _preamble_headers() -> set[str]:
    """Return the headers that the preamble includes."""
    seen: set[str] = set()
    waiting = [UTILS]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += INCLUDE.findall((mlx_headers() / name).read_text())
    return seen


def inline_includes(headers: Sequence[str]) -> str:
    """Return the text of MLX's headers with their includes in place, each header once.

    Headers that the preamble includes are left out. Headers that the shim replaces stay includes.
    """
    seen = _preamble_headers()

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        if (SHIM / name).exists():
            return f'#include "{name}"\n'
        text = (mlx_headers() / name).read_text().replace("#pragma once", "")
        return INCLUDE.sub(lambda match: expand(match.group(1)), text)

    return "\n".join(expand(KERNEL_FOLDER + header) for header in headers)


def _split_parameters(text: str, function: str) -> list[str]:
    """Return the parameters of the kernel `function`, as written.

    Raises:
        KernelCompileError: there is no such kernel, or its parameters do not end.
    """
    # Helpers may have the kernel's name: the kernel is the function after [[kernel]] or the keyword.
    found = re.search(rf"\bkernel\b[^;{{}}]*?\bvoid\s+{function}\s*\(", text)
    if found is None:
        raise KernelCompileError(f"no kernel function '{function}' in these headers")
    if (end := find_closing_bracket(text, found.end() - 1)) is None:
        raise KernelCompileError(f"the parameters of '{function}' do not end")
    return split_at_commas(text[found.end() : end])


_HOST_ARGUMENTS = """
struct sim_pointer { void* at; template <class T> operator T*() const { return (T*)at; } };
struct sim_reference { void* at; template <class T> operator T&() const { return *(T*)at; } };
struct sim_triple {
  uint3 v;
  operator metal::vec<uint, 3>() const { return v; }
  operator metal::vec<uint, 2>() const { return v.xy; }
  operator metal::vec<ushort, 3>() const { return ushort3(v); }
  operator metal::vec<ushort, 2>() const { return ushort3(v).xy; }
  operator uint() const { return v.x; }
};
"""


class HostKernel:
    """One instantiation of a kernel function from MLX's headers.

    Args:
        headers: files below mlx/backend/metal/kernels.
        function: name of the `[[kernel]]` template.
        template: its template arguments, as C++ text ("float, 64").
        constants: values of the function constants, by name; the others are false or 0.
    """

    def __init__(
        self, headers: Sequence[str], function: str, template: str, constants: Mapping[str, int | bool]
    ) -> None:
        text = blank_comments(inline_includes(headers))

        def define_constant(match: re.Match[str]) -> str:
            kind, name = match.groups()
            return f"constant constexpr {kind} {name} = {kind}({int(constants.get(name, 0))});"

        text = FUNCTION_CONSTANT.sub(define_constant, text)
        self._text = text
        self.name = f"{function}<{template}>"
        self.slots: list[int] = []
        """The indices of the kernel's buffers, in the order of the signature."""
        arguments = []
        for number, parameter in enumerate(_split_parameters(text, function)):
            match = PARAMETER.fullmatch(parameter.strip())
            plain = re.match(r"(.*?)(\w+)\s*$", parameter.strip(), re.S)
            attribute = match.group("attribute").strip() if match else f"buffer({number})"
            kind = match.group("type") if match else plain.group(1) if plain else ""
            arguments.append(self._call_argument(attribute, kind, constants))
        self._unit = (
            PREAMBLE + '#line 1 "kernel"\n' + to_cpp(text) + _HOST_ARGUMENTS + entry_point(self.name, arguments)
        )

    def _call_argument(self, attribute: str, kind: str, constants: Mapping[str, int | bool]) -> str:
        buffer = re.match(r"buffer\(\s*(\d+)\s*\)(?:\s*,\s*function_constant\(\s*(\w+)\s*\))?", attribute)
        if buffer is None:
            expression = attribute_value(attribute)
            return f"sim_triple{{{expression}}}" if "SIM_3" in expression or "uint3" in expression else expression
        wrapper = "sim_reference" if "&" in kind else "sim_pointer"
        if buffer.group(2) and not constants.get(buffer.group(2)):
            return f"{wrapper}{{nullptr}}"
        self.slots.append(int(buffer.group(1)))
        return f"{wrapper}{{b[{len(self.slots) - 1}]}}"

    def __call__(
        self, buffers: Mapping[int, npt.NDArray[np.generic] | ResultArray], threads: Triple, threadgroup: Triple
    ) -> LaunchResult:
        """Run a grid of `threads`. Its last threadgroups may be smaller (Metal's `dispatchThreads`).

        `buffers` maps the index in `[[buffer(n)]]` to an input or a result. One that is not given is bound with no
        bytes: any access to it is out of bounds. The outputs are in the order of `slots`.
        """
        current = settings.current()
        specs = []
        for index in self.slots:
            given = buffers.get(index, np.zeros(0, np.uint8))
            if isinstance(given, ResultArray):
                size = math.prod(given.shape) * given.dtype.size
                specs.append(BufferSpec(f"buffer({index})", given.before, size, given.dtype.size, writable=True))
            else:
                data = np.ascontiguousarray(given)
                specs.append(BufferSpec(f"buffer({index})", data, data.nbytes, data.itemsize))
        dispatch = LaunchSpec(self.name, self._text, specs, threads, threadgroup)
        zeroed = build(self._unit, Build.ZEROED) if current.poison else None
        return run(dispatch, build(self._unit, current.build), current, zeroed)
