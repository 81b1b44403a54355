"""Rules for kernels (MSL 5.1, 5.2): a kernel returns void, and an attribute names the source of each other argument.

An argument that is a pointer or reference needs no attribute. It lies in device, constant or threadgroup memory. No two
arguments have one index, and an index is below 31. What a thread is told about itself is a ushort or a uint; positions
and sizes may be vectors of two or three. No kernel calls another.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from cortexmlx.metal.lab.legal.frontend import Complaint
from cortexmlx.metal.lab.legal.rules.spaces import space_of
from cortexmlx.metal.lab.legal.tree import FUNCTIONS, Node, in_text, kind_of, marks

_BY_ADDRESS = {"POINTER", "LVALUEREFERENCE"}
_ARRAYS = {"CONSTANTARRAY", "INCOMPLETEARRAY", "DEPENDENTSIZEDARRAY"}
_INDICES = 31
_INDEXED = re.compile(r"(buffer|threadgroup)(?:\((-?\d+)\))?")
_NUMBERS = frozenset(
    {
        "dispatch_quadgroups_per_threadgroup",
        "dispatch_simdgroups_per_threadgroup",
        "quadgroup_index_in_threadgroup",
        "quadgroups_per_threadgroup",
        "simdgroup_index_in_threadgroup",
        "simdgroups_per_threadgroup",
        "thread_execution_width",
        "thread_index_in_quadgroup",
        "thread_index_in_simdgroup",
        "thread_index_in_threadgroup",
        "threads_per_simdgroup",
    }
)
_POSITIONS = frozenset(
    {
        "dispatch_threads_per_threadgroup",
        "grid_origin",
        "grid_size",
        "thread_position_in_grid",
        "thread_position_in_threadgroup",
        "threadgroup_position_in_grid",
        "threadgroups_per_grid",
        "threads_per_grid",
        "threads_per_threadgroup",
    }
)
_NUMBER = re.compile(r"unsigned (?:int|short)")
_POSITION = re.compile(r"unsigned (?:int|short)|(?:metal::)?vec<unsigned (?:int|short), [23]>")
_QUALIFIERS = re.compile(r"\b(?:const|__private|__generic)\s+")


def _kernel(node: Node) -> Iterator[Complaint]:
    name = node.cursor.spelling
    if node.cursor.result_type.spelling != "void":
        yield Complaint(node.line, f"the kernel '{name}' returns a value: a kernel returns void")
    taken: set[tuple[str, str]] = set()
    for parameter in node.cursor.get_children():
        if kind_of(parameter) != "PARM_DECL":
            continue
        line, type_ = int(parameter.location.line), parameter.type.get_canonical()
        given = marks(parameter)
        yield from _indexed(parameter, line, given, taken)
        yield from _told(parameter, line, given)
        if type_.kind.name in _BY_ADDRESS or type_.kind.name in _ARRAYS:
            element = type_.get_pointee() if type_.kind.name in _BY_ADDRESS else type_.element_type
            if space_of(element.spelling) is None and space_of(type_.spelling) is None:
                yield Complaint(
                    line,
                    f"the kernel's argument '{parameter.spelling}' must lie in device, constant or threadgroup memory",
                )
        elif not given and not _dependent(type_.kind.name):
            yield Complaint(line, f"the kernel's argument '{parameter.spelling}' has no attribute that says what it is")
        elif [mark.split("(")[0] for mark in given] == ["buffer"]:
            yield Complaint(
                line, f"the kernel's argument '{parameter.spelling}' is a buffer: take a pointer or reference to it"
            )


def _indexed(parameter: Any, line: int, given: Sequence[str], taken: set[tuple[str, str]]) -> Iterator[Complaint]:
    """Check the index of a buffer or of threadgroup memory, and whose memory it is. Function constants choose among
    arguments with one index: those are not compared.
    """
    type_ = parameter.type.get_canonical()
    for mark in given:
        found = _INDEXED.fullmatch(mark)
        if found is None:
            continue
        kind, index = found.group(1), found.group(2)
        if index is not None and not 0 <= int(index) < _INDICES:
            yield Complaint(line, f"'{kind}({index})': indices of {kind}s go from 0 to {_INDICES - 1}")
        if index is not None and "function_constant" not in given:
            if (kind, index) in taken:
                yield Complaint(line, f"'{kind}({index})' is the index of two arguments")
            taken.add((kind, index))
        if type_.kind.name in _BY_ADDRESS and not _dependent(type_.get_pointee().kind.name):
            space = space_of(type_.get_pointee().spelling)
            if space is not None and (space == "threadgroup") != (kind == "threadgroup"):
                yield Complaint(
                    line, f"'{parameter.spelling}' lies in {space} memory: its attribute cannot be '{kind}'"
                )


def _told(parameter: Any, line: int, given: Sequence[str]) -> Iterator[Complaint]:
    """Check the attributes that tell a thread where it is, and the types of what they tell."""
    names = [mark for mark in given if mark.startswith(("thread", "simdgroup", "quadgroup", "dispatch", "grid"))]
    names = [name for name in names if not _INDEXED.fullmatch(name)]
    type_ = parameter.type.get_canonical()
    spelled = _QUALIFIERS.sub("", type_.spelling)
    if len(names) > 1:
        both = " and ".join(names)
        yield Complaint(line, f"'{parameter.spelling}' has the attributes {both}: it can be one thing only")
    for name in names:
        if name not in _NUMBERS | _POSITIONS:
            yield Complaint(line, f"unknown attribute '{name}': Metal has no such attribute")
        elif not _dependent(type_.kind.name) and not (_NUMBER if name in _NUMBERS else _POSITION).fullmatch(spelled):
            wanted = "a ushort or uint" + ("" if name in _NUMBERS else ", or a vector of two or three")
            yield Complaint(line, f"'{name}' is {wanted}, and '{parameter.spelling}' is not")


def _call(node: Node) -> Iterator[Complaint]:
    called = node.cursor.referenced
    if called is None or kind_of(called) not in FUNCTIONS or not in_text(called):
        return
    if "kernel" in marks(called):
        yield Complaint(node.line, f"'{called.spelling}' is a kernel: no function calls one")


def _dependent(kind: str) -> bool:
    return kind in ("UNEXPOSED", "DEPENDENT", "INVALID")


def complaints(nodes: Sequence[Node]) -> Iterator[Complaint]:
    """Yield kernels that cannot be launched with their signature."""
    for node in nodes:
        if node.kind in FUNCTIONS and not node.instantiated and "kernel" in marks(node.cursor):
            yield from _kernel(node)
        elif node.kind == "CALL_EXPR":
            yield from _call(node)
