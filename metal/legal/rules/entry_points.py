"""Rules for kernels (MSL 5.1, 5.2.3): a kernel returns void, and an attribute names the source of each other argument.

An argument that is a pointer or reference needs no attribute. It lies in device, constant or threadgroup memory.
"""

from collections.abc import Iterator, Sequence

from ..frontend import Complaint
from ..tree import FUNCTIONS, Node, kind_of, marks
from .spaces import space_of

_BY_ADDRESS = {"POINTER", "LVALUEREFERENCE"}
_ARRAYS = {"CONSTANTARRAY", "INCOMPLETEARRAY", "DEPENDENTSIZEDARRAY"}


def _kernel(node: Node) -> Iterator[Complaint]:
    name = node.cursor.spelling
    if node.cursor.result_type.spelling != "void":
        yield Complaint(node.line, f"the kernel '{name}' returns a value: a kernel returns void")
    for parameter in node.cursor.get_children():
        if kind_of(parameter) != "PARM_DECL":
            continue
        line, type_ = int(parameter.location.line), parameter.type.get_canonical()
        given = marks(parameter)
        if type_.kind.name in _BY_ADDRESS or type_.kind.name in _ARRAYS:
            element = type_.get_pointee() if type_.kind.name in _BY_ADDRESS else type_.element_type
            if space_of(element.spelling) is None and space_of(type_.spelling) is None:
                yield Complaint(
                    line,
                    f"the kernel's argument '{parameter.spelling}' must lie in device, constant or threadgroup memory",
                )
        elif not given and not _dependent(type_.kind.name):
            yield Complaint(line, f"the kernel's argument '{parameter.spelling}' has no attribute that says what it is")
        elif given == ["buffer"]:
            yield Complaint(
                line, f"the kernel's argument '{parameter.spelling}' is a buffer: take a pointer or reference to it"
            )


def _dependent(kind: str) -> bool:
    return kind in ("UNEXPOSED", "DEPENDENT", "INVALID")


def complaints(nodes: Sequence[Node]) -> Iterator[Complaint]:
    """Yield kernels that cannot be launched with their signature."""
    for node in nodes:
        if node.kind in FUNCTIONS and not node.instantiated and "kernel" in marks(node.cursor):
            yield from _kernel(node)
