"""Rewrite Metal text as C++: the few constructs that macros cannot express. Line numbers do not change."""

import re
from dataclasses import dataclass

from cortexmlx.metal.lab.legal.msl import at_top, blank_comments, split
from cortexmlx.metal.lab.sim.translation.paths import mark_paths

_STRING_OR_NUMBER = re.compile(r'"(?:\\.|[^"\\\n])*"|(?<![\w.])\.?\d(?:[eEpP][+-]|\'?[\w.])*')
_FLOATING = re.compile(
    r"(?P<digits>(?:(?:\d[\d']*)?\.\d[\d']*|\d[\d']*\.)(?:[eE][+-]?\d+)?|\d[\d']*[eE][+-]?\d+"
    r"|0[xX][\da-fA-F]*\.?[\da-fA-F]*[pP][+-]?\d+)(?P<suffix>[hH]|bf|BF|)"
)
_THREADGROUP = re.compile(r"\bthreadgroup\b")
_DECLARATOR = re.compile(r"\s*(?P<type>.*?)(?P<name>\b\w+)\s*(?P<dims>(?:\[.*\])?)\s*$", re.S)
# A parameter that points to a thread's own memory, and what assigns to a pointer.
_OWN_POINTER = re.compile(
    r"(?P<type>[(,]\s*(?:const\s+)?thread\b(?:[^(),;{}<>*&]|<[^<>(){};]*(?:<[^<>(){};]*>[^<>(){};]*)*>)*\*)"
    r"\s*(?P<name>[A-Za-z_]\w*)(?=\s*[,)])"
)
_ASSIGNED = r"(?:\+\+|--)\s*{0}\b|\b{0}\s*(?:\+\+|--|[-+]?=(?!=))"
_HOST_NAME = re.compile(r"template\s*\[\[host_name\([^\]]*\)\]\]\s*\[\[kernel\]\]\s*(decltype\()")


def _literal(match: re.Match[str]) -> str:
    """Return a floating literal in C++, which does not have Metal's: no suffix is a float, `h` a half, `bf` a
    bfloat.
    """
    number = _FLOATING.fullmatch(match.group())
    if number is None:
        return match.group()
    digits, suffix = number.group("digits"), number.group("suffix").lower()
    return {"": f"{digits}f", "h": f"{digits}f16", "bf": f"bfloat((__bf16){digits})"}[suffix]


def _statement_end(text: str, start: int) -> int | None:
    """Return the index of the semicolon that ends the declaration at `start`; None for a function or a parameter."""
    before = ""
    for at, c in at_top(text, start):
        if c == ";":
            return at
        if c == "{" and before == ")":
            return None
        before = before if c.isspace() else c
    return None


@dataclass(frozen=True)
class _Declarator:
    """One variable of a declaration: `type name dims value`. Only the first variable of a declaration has a type."""

    type: str
    name: str
    dims: str
    value: str


def _declarator(text: str) -> _Declarator | None:
    end = next((at for at, c in at_top(text) if c in "={"), len(text))
    if any(c in "*&()" for at, c in at_top(text) if at < end):
        return None
    found = _DECLARATOR.fullmatch(text[:end])
    return found and _Declarator(found["type"].strip(), found["name"], found["dims"], text[end:].strip())


def _threadgroup_variables(statement: str) -> str | None:
    """Return `T x[N], y = 1` as references into the threadgroup's memory; None for pointers, which do not change."""
    declarators = [_declarator(part) for part in split(statement)]
    if not declarators or declarators[0] is None or not declarators[0].type:
        return None
    out = []
    for d in declarators:
        if d is None:
            return None
        out.append(f"SIM_THREADGROUP({d.name}, ({declarators[0].type}), {d.dims})")
        if d.value:
            out.append(f"SIM_INITIAL({d.name}, {d.value})")
    return " ".join(out)


def _starts_statement(text: str, at: int) -> bool:
    before = text[:at].rstrip(" \t\n\\")  # of a macro's lines, too
    return not before or before[-1] in ";{}:" or before.rsplit("\n", 1)[-1].lstrip().startswith("#")


def _threadgroup_memory(text: str) -> str:
    out, at = [], 0
    for found in _THREADGROUP.finditer(text):
        if found.start() < at or not _starts_statement(text, found.start()):
            continue
        end = _statement_end(text, found.end())
        new = _threadgroup_variables(text[found.end() : end]) if end is not None else None
        if new is not None and end is not None:
            lines = text.count("\n", found.start(), end) - new.count("\n")
            out += [text[at : found.start()], new, "\n" * lines]
            at = end + 1
    return "".join(out) + text[at:]


def _sized_pointers(text: str) -> str:
    """Give a function that takes a pointer to a thread's own array the array's size, too.

    The compiler finds it at the call: of the member or row that is passed, not of the variable around it. It then
    checks the function's indices before it optimises. A pointer that the text moves stays as it is.
    """

    def sized(found: re.Match[str]) -> str:
        if re.search(_ASSIGNED.format(found["name"]), text):
            return found.group()
        return f"{found['type']} const {found['name']} SIM_SIZED"

    return _OWN_POINTER.sub(sized, text)


def to_cpp(text: str) -> str:
    """Return Metal kernel text as C++ for the shim headers."""
    text = blank_comments(text)
    text = re.sub(r"\[\[\s*threadgroup\b", "[[sim_threadgroup", text)
    text = _threadgroup_memory(text)
    text = _sized_pointers(text)
    text = _STRING_OR_NUMBER.sub(_literal, text)
    text = _HOST_NAME.sub(r"template \1", text)
    return mark_paths(text)
