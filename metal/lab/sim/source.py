"""The kernel text that MLX generates for `mx.fast.metal_kernel`: signature, address spaces, attributes, instantiation.

A test compares it with the text that MLX prints, character by character (tests/metal/test_kernels.py).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import mlx.core as mx

from cortexmlx.metal.lab.sim.buffers import SparseArray

TemplateValue = bool | int | mx.Dtype
TemplateArgs = Sequence[tuple[str, TemplateValue]]

MAX_CONSTANT_ELEMENTS = 8

ATTRIBUTES: dict[str, str] = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

_TYPE_NAMES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
    mx.complex64: "complex64_t",
}


class Role(Enum):
    """What a buffer argument of the kernel holds."""

    INPUT = "input"
    SHAPE = "shape"
    STRIDES = "strides"
    NDIM = "ndim"
    OUTPUT = "output"


@dataclass(frozen=True)
class BufferParam:
    """One buffer of the generated signature."""

    name: str
    role: Role
    index: int
    element: str
    """C++ type of an element."""
    reference: bool = False
    """Whether it is passed as `T&`."""
    constant: bool = False
    """Whether it is in `constant` memory."""


@dataclass(frozen=True)
class KernelText:
    """The generated text of one instantiation, and what a host needs to call it."""

    name: str
    text: str
    instance: str
    template: Mapping[str, str]
    """Template arguments by name, as the text spells them."""
    buffers: tuple[BufferParam, ...]
    attributes: tuple[str, ...]


def type_name(dtype: mx.Dtype) -> str:
    """Return the Metal name of an MLX dtype, as MLX's generated text spells it."""
    return _TYPE_NAMES[dtype]


def _template_text(value: TemplateValue) -> str:
    if isinstance(value, mx.Dtype):
        return type_name(value)
    return str(int(value))


def _template_kind(value: TemplateValue) -> str:
    if isinstance(value, mx.Dtype):
        return "typename"
    return "bool" if isinstance(value, bool) else "int"


def generate(
    name: str,
    header: str,
    source: str,
    inputs: Sequence[tuple[str, mx.array | SparseArray]],
    outputs: Sequence[tuple[str, mx.Dtype]],
    template: TemplateArgs | None,
    atomic_outputs: bool,
) -> KernelText:
    """Return the Metal text that MLX would compile for this call of a custom kernel.

    Inputs of fewer than 8 elements are in `constant` memory; 0-dimensional inputs are passed by reference. Shapes,
    strides, dimension counts and attributes are passed if their names occur in the body.
    """
    kernel = f"custom_kernel_{name}"
    arguments = {key: _template_text(value) for key, value in template or ()}
    if template:
        kernel += re.sub(r"\W", "_", "_" + "".join(f"_{argument}" for argument in arguments.values()))
    params: list[BufferParam] = []
    lines: list[str] = []

    def add_param(param_name: str, role: Role, element: str, space: str, reference: bool = False) -> None:
        index = len(params)
        params.append(BufferParam(param_name, role, index, element, reference, space.endswith("constant")))
        lines.append(f"  {space} {element}{'&' if reference else '*'} {param_name} [[buffer({index})]]")

    for input_name, array in inputs:
        element = type_name(array.dtype)
        scalar, small = array.ndim == 0, array.size < MAX_CONSTANT_ELEMENTS
        kernel += f"_{element}" + ("s" if scalar else "c" if small else "")
        add_param(input_name, Role.INPUT, element, "const constant" if small else "const device", scalar)
        if not scalar:
            if f"{input_name}_shape" in source:
                add_param(f"{input_name}_shape", Role.SHAPE, "int", "const constant")
            if f"{input_name}_strides" in source:
                add_param(f"{input_name}_strides", Role.STRIDES, "int64_t", "const constant")
            if f"{input_name}_ndim" in source:
                add_param(f"{input_name}_ndim", Role.NDIM, "int", "const constant", True)
    for output_name, dtype in outputs:
        element = type_name(dtype)
        kernel += f"_{element}"
        add_param(output_name, Role.OUTPUT, f"atomic<{element}>" if atomic_outputs else element, "device")
    attributes = tuple(a for a in ATTRIBUTES if a in source)
    lines += [f"  {ATTRIBUTES[a]} {a} [[{a}]]" for a in attributes]

    text = header
    instance = kernel
    if template:
        text += "template <" + ", ".join(f"{_template_kind(value)} {key}" for key, value in template) + ">\n"
        instance = f"{kernel}<{', '.join(arguments.values())}>"
    text += f"[[kernel]] void {kernel}(\n" + ",\n".join(lines) + ") {\n" + source + "\n}\n"
    if template:
        text += f'\ntemplate [[host_name("{kernel}")]] [[kernel]] decltype({instance}) {instance};\n'
    return KernelText(kernel, text, instance, arguments, tuple(params), attributes)
