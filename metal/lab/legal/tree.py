"""The syntax tree of a text as a list of nodes: the text as it is written, and every instantiation of its templates.

libclang shows a template as it is written. The walk finds an instantiation at a call or at an explicit instantiation
that text.py has named. It visits each instantiation once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cortexmlx.metal.lab.legal.frontend import MAIN, Parsed, template_of

_FUNCTIONS = {"FUNCTION_DECL", "CXX_METHOD", "CONSTRUCTOR", "DESTRUCTOR", "CONVERSION_FUNCTION"}
FUNCTIONS = frozenset(_FUNCTIONS | {"FUNCTION_TEMPLATE"})
_USES = {"CALL_EXPR", "DECL_REF_EXPR", "MEMBER_REF_EXPR", "OVERLOADED_DECL_REF"}


@dataclass(frozen=True, eq=False)
class Node:
    """A place in the tree."""

    cursor: Any
    kind: str
    parent: Node | None
    instantiated: bool
    """Whether this is part of an instantiation: a copy of what is written elsewhere."""

    @property
    def line(self) -> int:
        """The line in the text."""
        return int(self.cursor.location.line)

    @property
    def type(self) -> str:
        """The canonical type: all names resolved, address spaces by the front end's names."""
        return str(self.cursor.type.get_canonical().spelling)

    def above(self) -> Iterator[Node]:
        """Yield the nodes around this one, from the inside out."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    def function(self) -> Node | None:
        """Return the function around this node, or None."""
        return next((node for node in self.above() if node.kind in FUNCTIONS), None)


def in_text(cursor: Any) -> bool:
    """Whether the cursor is in the text itself, not in a header."""
    file = cursor.location.file
    return file is not None and file.name == MAIN


def kind_of(cursor: Any) -> str:
    """Return the name of the cursor's kind, or "UNKNOWN" for a kind that the bindings do not know. No rule needs such a
    kind.
    """
    try:
        return str(cursor.kind.name)
    except ValueError:
        return "UNKNOWN"


def marks(cursor: Any) -> list[str]:
    """Return the Metal attributes of a declaration."""
    return [
        child.spelling.removeprefix("metal ")
        for child in cursor.get_children()
        if kind_of(child) == "ANNOTATE_ATTR" and child.spelling.startswith("metal ")
    ]


def unwrapped(cursor: Any) -> Any:
    """Return an expression without the implicit conversions and parentheses around it."""
    while kind_of(cursor) in ("UNEXPOSED_EXPR", "PAREN_EXPR"):
        inside = list(cursor.get_children())
        if len(inside) != 1:
            break
        cursor = inside[0]
    return cursor


class _Walk:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.waiting: list[Any] = []
        self.seen: set[int] = set()

    def visit(self, cursor: Any, parent: Node | None, instantiated: bool) -> None:
        node = Node(cursor, kind_of(cursor), parent, instantiated)
        self.nodes.append(node)
        if node.kind in _USES:
            self._follow(cursor)
        for child in cursor.get_children():
            self.visit(child, node, instantiated)

    def _follow(self, cursor: Any) -> None:
        used = cursor.referenced
        if used is None or kind_of(used) not in _FUNCTIONS or not in_text(used):
            return
        if used.hash in self.seen or template_of(used) is None:
            return
        self.seen.add(used.hash)
        self.waiting.append(used)


def walk(parsed: Parsed) -> list[Node]:
    """Return every node of the text in order, then the nodes of the instantiations."""
    found = _Walk()
    for cursor in parsed.unit.cursor.get_children():
        if in_text(cursor):
            found.visit(cursor, None, False)
    while found.waiting:
        found.visit(found.waiting.pop(), None, True)
    return found.nodes
