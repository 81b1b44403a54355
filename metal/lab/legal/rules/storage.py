"""The places of variables (MSL 4): constants at program scope, threadgroup variables in kernels, no other statics.

A threadgroup variable has no initial value, and those of a kernel fit in 32 KB.
"""

from collections.abc import Iterator, Sequence

from cortexmlx.metal.lab.legal.frontend import Complaint
from cortexmlx.metal.lab.legal.tree import Node, marks

_PROGRAM_SCOPE = {"TRANSLATION_UNIT", "NAMESPACE"}
_MOST_BYTES = 32768
_BRANCHES = {"IF_STMT", "SWITCH_STMT"}
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
    words = [token.spelling for token in node.cursor.get_tokens()]
    if {"=", "{"} & set(words[words.index(name) :] if name in words else ()):
        yield Complaint(node.line, f"the threadgroup variable '{name}' cannot have an initial value: store it")
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


def _too_large(nodes: Sequence[Node]) -> Iterator[Complaint]:
    """Refuse a kernel that declares more threadgroup memory than there is.

    Variables in branches are left to the simulator's launch: the compiler may drop the branch.
    """
    declared: dict[int, int] = {}
    last: dict[int, Node] = {}
    for node in nodes:
        if node.kind != "VAR_DECL" or "threadgroup variable" not in marks(node.cursor):
            continue
        function, size = node.function(), node.cursor.type.get_size()
        if function is None or size < 0 or any(around.kind in _BRANCHES for around in node.above()):
            continue
        align, key = max(node.cursor.type.get_align(), 1), function.cursor.hash
        declared[key] = -(-declared.get(key, 0) // align) * align + size
        last[key] = node
    for key, size in declared.items():
        if (total := -(-size // 16) * 16) > _MOST_BYTES:
            yield Complaint(last[key].line, f"{total} bytes of threadgroup memory, at most {_MOST_BYTES} are there")


def complaints(nodes: Sequence[Node]) -> Iterator[Complaint]:
    """Yield variables in the wrong place, with initial values, or too large."""
    yield from _too_large(nodes)
    for node in nodes:
        if node.kind == "VAR_DECL" and not node.instantiated:
            yield from _variable(node)
        elif node.kind == "UNEXPOSED_DECL" and not node.instantiated:
            yield from _template(node)
