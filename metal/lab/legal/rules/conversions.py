"""Implicit conversions: a bfloat becomes a float, no float becomes a bfloat (MSL 2.1). And addresses of vector
elements.

The rule for bfloat is the specification, as MLX's bf16_math.h quotes it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from cortexmlx.metal.lab.legal.frontend import Complaint
from cortexmlx.metal.lab.legal.tree import Node, in_text, kind_of, unwrapped

_FLOAT = "a float does not become a bfloat by itself: write bfloat(...) around it"
_EXPLICIT = {"CSTYLE_CAST_EXPR", "CXX_STATIC_CAST_EXPR", "CXX_FUNCTIONAL_CAST_EXPR"}
_SPACES = ("__private ", "__global ", "__local ", "__constant ", "__generic ", "const ", "volatile ")
_ELEMENTS = {"x", "y", "z", "w"}


def _scalar(type_: Any) -> str:
    spelling = str(type_.get_canonical().spelling)
    while any(spelling.startswith(word) for word in _SPACES):
        for word in _SPACES:
            spelling = spelling.removeprefix(word)
    return spelling


def _to_bfloat(node: Node) -> Iterator[Complaint]:
    if node.parent and node.parent.kind in _EXPLICIT:
        return
    inside = list(node.cursor.get_children())
    if len(inside) == 1 and _scalar(node.cursor.type) == "__bf16" and _scalar(inside[0].type) == "float":
        yield Complaint(node.line, _FLOAT)


def _initialized(node: Node) -> Iterator[Complaint]:
    """Check initializers in braces. The tree shows them as they are written, without their conversions."""
    type_ = node.cursor.type.get_canonical()
    values = list(node.cursor.get_children())
    if type_.kind.name == "CONSTANTARRAY":
        wanted = [type_.element_type] * len(values)
    elif type_.kind.name == "RECORD":
        wanted = [field.type for field in type_.get_fields()]
    else:
        wanted = [type_] * len(values)
    for value, element in zip(values, wanted, strict=False):
        if _scalar(element) == "__bf16" and _scalar(value.type) == "float":
            yield Complaint(int(value.location.line), _FLOAT)


def _updated(node: Node) -> Iterator[Complaint]:
    left, right = [*node.cursor.get_children(), None, None][:2]
    if (
        left is not None
        and right is not None
        and _scalar(left.type) == "__bf16"
        and _scalar(right.type) in ("float", "half")
    ):
        yield Complaint(
            node.line,
            f"the result is a {_scalar(right.type)}, which becomes no bfloat by itself: write out the assignment",
        )


def _is_element(cursor: Any) -> bool:
    """Whether an expression is an element of a vector by name: x, y, z or w."""
    found = unwrapped(cursor)
    if kind_of(found) != "MEMBER_REF_EXPR" or found.spelling not in _ELEMENTS or found.referenced is None:
        return False
    owner = found.referenced.semantic_parent
    return owner is not None and owner.spelling in ("vec", "__packed") and not in_text(owner)


def _element(node: Node) -> Iterator[Complaint]:
    """Refuse a pointer or a reference to an element of a vector."""
    inside = list(node.cursor.get_children())
    if node.kind == "UNARY_OPERATOR":
        first = next((token.spelling for token in node.cursor.get_tokens()), "")
        if first == "&" and inside and _is_element(inside[0]):
            yield Complaint(node.line, "the elements of a vector have no address")
    elif node.kind == "VAR_DECL" and node.cursor.type.kind.name == "LVALUEREFERENCE":
        if inside and _is_element(inside[-1]) and not node.cursor.type.get_pointee().is_const_qualified():
            yield Complaint(node.line, "a reference cannot be bound to an element of a vector")
    elif node.kind == "CALL_EXPR" and node.cursor.referenced is not None:
        parameters = [c for c in node.cursor.referenced.get_children() if kind_of(c) == "PARM_DECL"]
        for parameter, argument in zip(parameters, node.cursor.get_arguments(), strict=False):
            reference = (
                parameter.type.kind.name == "LVALUEREFERENCE" and not parameter.type.get_pointee().is_const_qualified()
            )
            if reference and argument is not None and _is_element(argument):
                yield Complaint(node.line, "a reference cannot be bound to an element of a vector")


def complaints(nodes: Sequence[Node]) -> Iterator[Complaint]:
    """Yield implicit conversions to bfloat, and pointers and references to elements of vectors."""
    for node in nodes:
        if node.kind == "UNEXPOSED_EXPR":
            yield from _to_bfloat(node)
        elif node.kind == "COMPOUND_ASSIGNMENT_OPERATOR":
            yield from _updated(node)
        elif node.kind in ("UNARY_OPERATOR", "VAR_DECL", "CALL_EXPR"):
            yield from _element(node)
        elif node.kind == "INIT_LIST_EXPR":
            yield from _initialized(node)
