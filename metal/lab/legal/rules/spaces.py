"""Address spaces (MSL 4): pointers and references that name none, and calls that do not fit the space of an object."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from cortexmlx.metal.lab.legal.frontend import Complaint
from cortexmlx.metal.lab.legal.tree import Node, in_text, kind_of, marks, unwrapped

_DECLARATIONS = {"VAR_DECL", "PARM_DECL", "FIELD_DECL", "TYPEDEF_DECL", "TYPE_ALIAS_DECL"}
_RETURNING = {"FUNCTION_DECL", "CXX_METHOD", "CONVERSION_FUNCTION"}
_CASTS = {
    "CSTYLE_CAST_EXPR",
    "CXX_STATIC_CAST_EXPR",
    "CXX_REINTERPRET_CAST_EXPR",
    "CXX_CONST_CAST_EXPR",
    "CXX_FUNCTIONAL_CAST_EXPR",
}
_NAMED = re.compile(r"\b__(?:private|global|local|constant)\b")
_OTHER_SPACE = {"__local": "device", "__global": "threadgroup", "__constant": "constant"}
SPACES = "device, constant, threadgroup or thread"


def space_of(spelling: str) -> str | None:
    """Return Metal's name of the address space of an object of this type, or None for thread memory."""
    outer = spelling.split("<", 1)[0]
    return next((metal for opencl, metal in _OTHER_SPACE.items() if re.search(rf"\b{opencl}\b", outer)), None)


def _own_space(type_: Any) -> bool:
    """Whether the outermost qualifiers of a type name an address space."""
    spelled = str(type_.get_canonical().spelling)
    while (shorter := re.sub(r"<[^<>]*>|\([^()]*\)", "", spelled)) != spelled:
        spelled = shorter
    last = max(spelled.rfind("*"), spelled.rfind("&"))
    return bool(_NAMED.search(spelled[last + 1 :] if last >= 0 else spelled))


def unspaced(type_: Any, depth: int = 0) -> bool:
    """Whether the type has a pointer or reference to memory in no named address space."""
    kind = type_.kind.name
    if kind in ("CONSTANTARRAY", "INCOMPLETEARRAY", "VARIABLEARRAY", "DEPENDENTSIZEDARRAY"):
        return unspaced(type_.element_type, depth)
    if kind in ("POINTER", "LVALUEREFERENCE", "RVALUEREFERENCE"):
        pointee = type_.get_pointee()
        if (
            pointee.kind.name in ("FUNCTIONPROTO", "FUNCTIONNOPROTO")
            or pointee.get_canonical().kind.name == "FUNCTIONPROTO"
        ):
            return False
        if "auto" in pointee.spelling.split() or pointee.kind.name == "AUTO":
            return False
        if kind == "LVALUEREFERENCE" and pointee.kind.name == "POINTER" and not unspaced(pointee, depth):
            return False  # `const device T*& x`: MLX's quantized kernels use it, so Metal accepts it
        forwards = kind == "RVALUEREFERENCE" and pointee.get_canonical().kind.name in ("UNEXPOSED", "DEPENDENT")
        return (not forwards and not _own_space(pointee)) or unspaced(pointee, depth)
    if depth < 3:
        for i in range(type_.get_num_template_arguments()):
            argument = type_.get_template_argument_type(i)
            if argument.kind.name != "INVALID" and unspaced(argument, depth + 1):
                return True
    return False


def _written_as_array(cursor: Any) -> bool:
    return kind_of(cursor) == "PARM_DECL" and any(token.spelling == "[" for token in cursor.get_tokens())


def _deduced(cursor: Any) -> bool:
    return any(token.spelling in ("auto", "decltype") for token in cursor.get_tokens())


def _undeclared(node: Node) -> Iterator[Complaint]:
    cursor = node.cursor
    if node.kind in _DECLARATIONS:
        type_ = cursor.underlying_typedef_type if node.kind in ("TYPEDEF_DECL", "TYPE_ALIAS_DECL") else cursor.type
        if type_.kind.name in ("AUTO", "INVALID") or cursor.spelling.startswith("__"):
            return
        if unspaced(type_) and not _written_as_array(cursor) and not _deduced(cursor):
            what = {"PARM_DECL": "parameter ", "FIELD_DECL": "member "}.get(node.kind, "")
            yield Complaint(
                node.line,
                f"{what}'{cursor.spelling}' is a pointer or reference that names no address space: add {SPACES}",
            )
    elif node.kind in _RETURNING:
        if unspaced(cursor.result_type) and not _deduced_result(cursor):
            yield Complaint(
                node.line,
                f"'{cursor.spelling}' returns a pointer or reference that names no address space: add {SPACES}",
            )
    elif node.kind in _CASTS and unspaced(cursor.type) and not _deduced(cursor):
        yield Complaint(node.line, f"a cast to a pointer or reference that names no address space: add {SPACES}")


def _deduced_result(cursor: Any) -> bool:
    return "auto" in str(cursor.result_type.spelling)


def _called_object(node: Node) -> Iterator[Complaint]:
    """Refuse a call of a member function that is not marked for the space of its object."""
    callee = next(iter(node.cursor.get_children()), None)
    if callee is None or kind_of(callee) != "MEMBER_REF_EXPR":
        return
    method = node.cursor.referenced
    if method is None or kind_of(method) != "CXX_METHOD" or not in_text(method) or method.is_static_method():
        return
    base = next(iter(callee.get_children()), None)
    if base is None or "__generic" not in method.type.spelling.rsplit(")", 1)[-1]:
        return
    held = unwrapped(base).type.get_canonical()
    held = held.get_pointee() if held.kind.name == "POINTER" else held
    space = space_of(_outer(held.spelling))
    if space:
        yield Complaint(
            node.line, f"'{method.spelling}' is called on an object in {space} memory: mark the function `{space}`"
        )


def _outer(spelling: str) -> str:
    last = max(spelling.rfind("*"), spelling.rfind("&"))
    return spelling[last + 1 :] if last >= 0 else spelling


def _copies(constructor: Any) -> bool:
    return constructor is not None and (constructor.is_copy_constructor() or constructor.is_move_constructor())


def _bound_arguments(node: Node) -> Iterator[Complaint]:
    """Refuse an argument from another space for a `const thread T&` (text.py makes this parameter a value)."""
    function = node.cursor.referenced
    if function is None or not in_text(function):
        return
    parameters = [c for c in function.get_children() if kind_of(c) == "PARM_DECL"]
    for parameter, argument in zip(parameters, node.cursor.get_arguments(), strict=False):
        if argument is None or "const thread&" not in marks(parameter):
            continue
        given = unwrapped(argument)
        if kind_of(given) == "CALL_EXPR" and _copies(given.referenced):
            given = unwrapped(next(given.get_arguments()))
        space = space_of(_outer(given.type.get_canonical().spelling))
        if space and given.type.get_canonical().kind.name != "POINTER":
            yield Complaint(
                node.line,
                f"parameter '{parameter.spelling}' of '{function.spelling}' is a `const thread` reference, "
                f"and the argument lies in {space} memory",
            )


def complaints(nodes: Sequence[Node]) -> Iterator[Complaint]:
    """Yield what is wrong with the address spaces of a text and the front end does not report itself."""
    for node in nodes:
        if not node.instantiated:
            yield from _undeclared(node)
        if node.kind == "CALL_EXPR":
            yield from _called_object(node)
            yield from _bound_arguments(node)
