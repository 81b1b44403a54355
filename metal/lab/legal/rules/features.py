"""Features of C++ that Metal leaves out (MSL 1.5.4), found in the syntax tree and in the words of the text."""

import re
from collections.abc import Iterator, Sequence

from cortexmlx.metal.lab.legal.diagnostics import Language
from cortexmlx.metal.lab.legal.frontend import Complaint, Parsed
from cortexmlx.metal.lab.legal.msl import blank
from cortexmlx.metal.lab.legal.tree import Node

_WORDS = (
    (
        re.compile(
            r"\b(?:unsigned\s+|signed\s+)?long\s+long\b|\b(?:0[xX][0-9a-fA-F]+|\d+)(?:[uU]?(?:ll|LL)|(?:ll|LL)[uU])\b"
        ),
        "Metal has no long long: its long has 64 bits",
    ),
    (re.compile(r"\b(?:asm|__asm__|__asm)\b"), "Metal has no asm"),
    (re.compile(r"\bregister\b"), "Metal has no `register`"),
    (re.compile(r"\bstd\s*::"), "Metal has no std: its library is in the namespace metal"),
    (re.compile(r"\b(?:thread_local|_Thread_local)\b"), "Metal has no thread_local"),
    (re.compile(r"\bvirtual\b"), "Metal has no virtual functions"),
    (re.compile(r"\b(?:try|catch|throw)\b"), "Metal has no exceptions"),
    (re.compile(r"\b(?:dynamic_cast|typeid)\b"), "Metal has no run-time type information"),
    (re.compile(r"\bnew\b(?=\s*[\w(:])|(?<!=)(?<!= )\bdelete\b(?=\s*(?:\[|\w))"), "Metal has no new and delete"),
    (re.compile(r"\bprintf\s*\("), "Metal has no printf: os_log of Metal 3.2 is what there is"),
    (re.compile(r"\bdouble\b"), "Metal has no double"),
    (
        re.compile(r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?[lL]\b"),
        "Metal has no long double: a literal ends in f, h or bf",
    ),
)
# Words that say what a function is for. A word that one of these characters follows is used as a name.
_STAGE = re.compile(r"\b(kernel|vertex|fragment)\b(?=\s*(?:[=;,)+\-*/%.<>&|^?\[:]|\]))(?!\s*\]\])")
_VARIABLE_STAGE = re.compile(r"\[\[[^\]]*\]\]")
_NODES = {
    "GOTO_STMT": "Metal has no goto",
    "INDIRECT_GOTO_STMT": "Metal has no goto",
    "ASM_STMT": "Metal has no asm",
    "MS_ASM_STMT": "Metal has no asm",
}
_DEFINES = {"FUNCTION_DECL", "CXX_METHOD", "FUNCTION_TEMPLATE"}


def _words(text: str) -> Iterator[Complaint]:
    plain = blank(text)
    for pattern, message in _WORDS:
        for found in pattern.finditer(plain):
            yield Complaint(plain.count("\n", 0, found.start()) + 1, message)
    named = _VARIABLE_STAGE.sub(lambda found: " " * len(found.group()), plain)
    for found in _STAGE.finditer(named):
        line = named.count("\n", 0, found.start()) + 1
        yield Complaint(line, f"'{found.group(1)}' is a word of the language and names nothing else")


def _node(node: Node, language: Language) -> Iterator[Complaint]:
    if node.kind in _NODES:
        yield Complaint(node.line, _NODES[node.kind])
    elif node.kind == "LAMBDA_EXPR" and language is Language.METAL_3_1:
        yield Complaint(node.line, "Metal 3.1 has no lambdas")
    elif node.kind in _DEFINES:
        if node.cursor.type.kind.name == "FUNCTIONPROTO" and node.cursor.type.is_function_variadic():
            yield Complaint(
                node.line, f"'{node.cursor.spelling}' takes a variable number of arguments: Metal has no `...`"
            )
        if node.cursor.spelling == "main":
            yield Complaint(node.line, "no function of Metal's may be called main")


def complaints(parsed: Parsed, nodes: Sequence[Node]) -> Iterator[Complaint]:
    """Yield uses of features that Metal does not have."""
    yield from (complaint for complaint in _words(parsed.text) if complaint.line not in parsed.dead)
    for node in nodes:
        if not node.instantiated:
            yield from _node(node, parsed.language)
