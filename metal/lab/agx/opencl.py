"""A Metal kernel's text as C++ for OpenCL: the same helpers and body after `dialect.h`, and another signature.

This module does what a header cannot do. A kernel in OpenCL is no template, takes no references and has no attributes.

- Types of the template become names before the kernel, numbers become names at the top of its body.
- A reference to a constant becomes its value. A GPU keeps both in its uniform registers.
- A parameter that Metal passes by attribute becomes a local variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from cortexmlx.errors import KernelCompileError
from cortexmlx.metal.lab.legal.msl import FUNCTION_CONSTANT, PARAMETER, blank_comments, closing, split

_KERNEL = re.compile(
    r"(?:template\s*<(?P<template>[^{};]*?)>\s*)?\[\[kernel[^\]]*\]\]\s*void\s+(?P<name>\w+)\s*\(", re.S
)
_INSTANTIATION = re.compile(r"^template\s*\[\[host_name[^;]*;", re.M)
_DIRECTIVE = re.compile(r"^[ \t]*(?:#[ \t]*include[^\n]*|#pragma once|using namespace metal;)[ \t]*$", re.M)
_VECTOR = re.compile(r"\b((?:float|half|u?(?:int|short|long|char))[234])\s*\(")
_TRIPLE = "(uint3)((uint){0}(0), (uint){0}(1), (uint){0}(2))"
_ATTRIBUTES = {
    "threadgroup_position_in_grid": _TRIPLE.format("get_group_id"),
    "thread_position_in_threadgroup": _TRIPLE.format("get_local_id"),
    "threads_per_threadgroup": _TRIPLE.format("get_local_size"),
    "thread_position_in_grid": _TRIPLE.format("get_global_id"),
    "simdgroup_index_in_threadgroup": "get_sub_group_id()",
    "thread_index_in_simdgroup": "get_sub_group_local_id()",
    "thread_index_in_threadgroup": "get_local_linear_id()",
}


@dataclass(frozen=True)
class Instance:
    """One kernel function, the arguments of its template as text, and the threads of a threadgroup."""

    function: str
    arguments: Mapping[str, str]
    threads: tuple[int, int, int]


def opencl_unit(text: str, instance: Instance, constants: Mapping[str, str] | None = None) -> str:
    """Return a translation unit with one kernel: `instance.function` of the Metal text.

    `constants` gives values to function constants. The others are false or 0, and a buffer that depends on one of them
    is null.

    Raises:
        KernelCompileError: the text has no such kernel, or a parameter that this dialect does not know.
    """
    text = _DIRECTIVE.sub("", _INSTANTIATION.sub("", blank_comments(text)))
    text = _VECTOR.sub(r"make_vec<\1>(", text)
    values = dict(constants or {})
    text = FUNCTION_CONSTANT.sub(lambda m: f"constant {m[1]} {m[2]} = {values.get(m[2], '0')};", text)
    helpers, at, chosen = [], 0, None
    for match in _KERNEL.finditer(text):
        end = _end(text, text.index("{", _end(text, match.end() - 1)))
        helpers.append(text[at : match.start()])
        at = end + 1
        if match["name"] == instance.function:
            chosen = match
    if chosen is None:
        raise KernelCompileError(f"no [[kernel]] function '{instance.function}' in this text")
    helpers.append(text[at:])
    close = _end(text, chosen.end() - 1)
    opening = text.index("{", close)
    body = text[opening + 1 : _end(text, opening)]
    types, numbers = _template(chosen["template"] or "", instance)
    signature, locals_ = _signature(split(text[chosen.end() : close]), values)
    dialect = (files("cortexmlx.metal.lab.agx") / "dialect.h").read_text()
    size = ", ".join(map(str, instance.threads))
    return (
        f"{dialect}{''.join(helpers)}{types}\n__attribute__((reqd_work_group_size({size})))\n"
        f"__kernel void {instance.function}({signature}) {{\n{numbers}{locals_}{body}}}\n"
    )


def _template(parameters: str, instance: Instance) -> tuple[str, str]:
    """Return the template's parameters: types as type names, numbers as constants for the top of the body."""
    types, numbers = "", ""
    for parameter in split(parameters):
        declared, _, default = (part.strip() for part in parameter.partition("="))
        kind, name = declared.split()
        value = instance.arguments.get(name, default)
        if not value:
            raise KernelCompileError(f"'{instance.function}' needs a value for its template parameter '{name}'")
        if kind == "typename":
            types += f"typedef {value} {name};\n"
        else:
            numbers += f"  constexpr {kind} {name} = {value};\n"
    return types, numbers


def _signature(parameters: list[str], constants: Mapping[str, str]) -> tuple[str, str]:
    """Return the parameters of an OpenCL kernel, and local variables for Metal's other parameters."""
    passed, locals_ = [], ""
    for parameter in parameters:
        match = PARAMETER.fullmatch(parameter.strip())
        if match is None:
            raise KernelCompileError(f"a kernel's parameter without an attribute: '{parameter.strip()}'")
        kind, name, attribute = match["type"].strip(), match["name"], match["attribute"].strip()
        needs = re.search(r"function_constant\(\s*(\w+)\s*\)", attribute)
        if attribute in _ATTRIBUTES:
            locals_ += f"  const {kind} {name} = {_ATTRIBUTES[attribute]};\n"
        elif attribute == "threadgroups_per_grid":  # from the command, as on a GPU: it has no name here
            passed.append(", ".join(f"const uint {name}_{axis}" for axis in "xyz"))
            locals_ += f"  const {kind} {name} = (uint3)({name}_x, {name}_y, {name}_z);\n"
        elif not attribute.startswith("buffer("):
            raise KernelCompileError(f"the attribute [[{attribute}]] of '{name}' is not in the dialect for AGX")
        elif needs and constants.get(needs[1], "0") in ("0", "false"):
            value = kind.removesuffix("&").replace("constant ", "")
            locals_ += f"  {value if kind.endswith('&') else kind} {name} = 0;\n"
        elif kind.endswith("&"):
            value = _argument(kind.removesuffix("&").replace("constant ", ""))
            passed.append(f"{value} {name}")
        else:
            passed.append(f"{_argument(kind)} {name}")
    return ", ".join(passed), locals_


def _argument(kind: str) -> str:
    """Return a type as an argument of an OpenCL kernel, which may not be a pointer to `size_t`."""
    return re.sub(r"\bsize_t\b", "ulong", kind)


def _end(text: str, at: int) -> int:
    """Return the position where the bracket that opens at `at` is closed."""
    if (end := closing(text, at)) is None:
        raise KernelCompileError(f"'{text[at]}' is never closed: {text[at : at + 60]!r}")
    return end
