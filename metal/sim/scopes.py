"""Where variables may live in Metal: constants at program scope, threadgroup variables only in a kernel.

A walk over statements and braces, enough to know whether a declaration stands in a namespace, a struct or a function.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SKIPPED = re.compile(
    r"^\s*(?:$|(?:using|typedef|static_assert|enum|struct|class|union|friend|extern|namespace|return|public|private)\b)"
)
_TEMPLATE = re.compile(r"^\s*template\s*<")
_TYPE = re.compile(r"\b(?:struct|class|union)\b[^()=]*$")


@dataclass(frozen=True)
class Declaration:
    """A statement that declares a variable, `at` its position in the text."""

    at: int
    text: str


def _strip_template(statement: str) -> str:
    """The statement without its leading `template <...>`."""
    found = _TEMPLATE.match(statement)
    if not found:
        return statement
    depth, at = 1, found.end()
    while at < len(statement) and depth:
        depth += {"<": 1, ">": -1}.get(statement[at], 0)
        at += 1
    return statement[at:]


def _declares_variable(statement: str) -> bool:
    plain = re.sub(r"\[\[.*?\]\]", "", _strip_template(statement), flags=re.S)
    before_value = plain.split("=", 1)[0]
    return not _SKIPPED.match(plain) and "(" not in before_value and re.search(r"\w\s+\w", before_value) is not None


def _walk(text: str) -> Iterator[tuple[tuple[str, ...], Declaration]]:
    """Every statement that ends in a semicolon, with the kinds of scope around it (outermost first)."""
    text = re.sub(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.M)
    scopes: list[str] = []
    start = parentheses = 0
    for at, c in enumerate(text):
        parentheses += {"(": 1, ")": -1}.get(c, 0)
        if parentheses:
            continue
        statement = text[start:at]
        if c == "{":
            scopes.append(_kind(statement))
            if scopes[-1] != "value":
                start = at + 1
        elif c == "}":
            closed = scopes.pop() if scopes else "code"
            if closed not in ("value", "struct"):
                start = at + 1
        elif c == ";":
            lead = len(statement) - len(statement.lstrip())
            yield tuple(scopes), Declaration(start + lead, statement.strip())
            start = at + 1


def _kind(statement: str) -> str:
    plain = _strip_template(statement)
    if re.search(r"\bnamespace\b[^()]*$", plain):
        return "namespace"
    if "[[kernel" in plain:
        return "kernel"
    if "=" in plain and "(" not in plain.split("=", 1)[0] and "operator" not in plain:
        return "value"
    return "struct" if _TYPE.search(plain) else "code"


def without_constant(text: str) -> Iterator[Declaration]:
    """Program-scope variables and static members that are not in `constant` memory."""
    names = ["constant", *re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t].*\bconstant\b", text, flags=re.M)]
    is_constant = re.compile(rf"\b(?:{'|'.join(names)})\b")
    for scopes, declaration in _walk(text):
        if not _declares_variable(declaration.text) or is_constant.search(declaration.text):
            continue
        at_program_scope = all(scope == "namespace" for scope in scopes)
        static_member = scopes[-1:] == ("struct",) and re.search(r"\bstatic\b", declaration.text)
        if at_program_scope or static_member:
            yield declaration


def threadgroup_outside_kernel(text: str) -> Iterator[Declaration]:
    """Threadgroup variables (not pointers or references) that are declared in an ordinary function."""
    for scopes, declaration in _walk(text):
        plain = re.sub(r"<[^<>]*>|\[[^\]]*\]", "", declaration.text)
        if (
            re.match(r"threadgroup\b", plain)
            and not re.search(r"[*&=(]", plain)
            and "code" in scopes
            and "kernel" not in scopes
        ):
            yield declaration
