"""The places of variables (MSL 4): constants at program scope, threadgroup variables in kernels, no other statics."""

from collections.abc import Iterator, Sequence

from ..frontend import Complaint
from ..tree import Node, marks

_PROGRAM_SCOPE = {"TRANSLATION_UNIT", "NAMESPACE"}
_CLASSES = {"STRUCT_DECL", "CLASS_DECL", "CLASS_TEMPLATE", "UNION_DECL", "CLASS_TEMPLATE_PARTIAL_SPECIALIZATION"}


def _in_constant(node: Node) -> bool:
    return "__constant" in node.cursor.type.spelling.split("<")[0] or "__constant" in node.type.split("<")[0]


def _variable(node: Node) -> Iterator[Complaint]:
    name = node.cursor.spelling
    parent = node.parent.kind if node.parent else "TRANSLATION_UNIT"
    if parent in _PROGRAM_SCOPE or parent == "UNEXPOSED_DECL":
        if not _in_constant(node):
            yield Complaint(node.line, f"'{name}' is a variable at program scope: it must be `constant`")
        return
    if parent in _CLASSES:
        if not _in_constant(node):
            yield Complaint(node.line, f"'{name}' is a static member: it must be `constant`")
        return
    if node.cursor.storage_class.name != "STATIC" or _in_constant(node):
        return
    if "threadgroup variable" not in marks(node.cursor):
        yield Complaint(node.line, f"'{name}' is a static variable in a function: Metal has none, but for `constant`")
        return
    function = node.function()
    if function is None or "kernel" not in marks(function.cursor):
        yield Complaint(
            node.line,
            f"the threadgroup variable '{name}' can only be declared in the kernel: pass a pointer to it",
        )


def _template(node: Node) -> Iterator[Complaint]:
    """Refuse a variable template that is not `constant`. The tree shows only its words."""
    words = [token.spelling for token in node.cursor.get_tokens()]
    before = words[: words.index(node.cursor.spelling)] if node.cursor.spelling in words else []
    if (
        before[:1] == ["template"]
        and "constant" not in before
        and not any(word.isupper() and len(word) > 1 for word in before)
    ):
        yield Complaint(node.line, f"'{node.cursor.spelling}' is a variable at program scope: it must be `constant`")


def complaints(nodes: Sequence[Node]) -> Iterator[Complaint]:
    """Yield variables in the wrong place."""
    for node in nodes:
        if node.kind == "VAR_DECL" and not node.instantiated:
            yield from _variable(node)
        elif node.kind == "UNEXPOSED_DECL" and not node.instantiated:
            yield from _template(node)
