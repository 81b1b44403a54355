"""What plain C++ would let through: address spaces, and the conversions that bfloat does not make by itself.

Two syntax-only passes over the same text. In the first `device`, `constant` and `threadgroup` are address spaces of
clang's, so a pointer or reference into one cannot become one into another. In the second, bfloat is a class with the
language's conversions. A search through the text finds pointers and references that name no address space at all, an
error in Metal.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cortexmlx.errors import KernelCompileError

from .built import cache_folder, content_key
from .rewrite import blank_comments, to_cpp
from .scopes import threadgroup_outside_kernel, without_constant
from .toolchain import syntax_command

SPACES = ("device", "constant", "threadgroup", "thread")
_ERROR = re.compile(r"^kernel:(\d+):\d+: error: (.*)$")
_ABOUT_BFLOAT = re.compile(r"'(?:const )?bfloat(?:16_t)?'|\(aka '(?:const )?bfloat'\)")
_CLANG_SPACES = {11: "device", 12: "constant", 13: "threadgroup"}  # as in shim/sim/keywords.h
_ABOUT_SPACES = re.compile(r"address.space|'[^']*\b(?:device|constant|threadgroup)\b[^']*'")
_COPIES_A_STRUCT = re.compile(r"no matching constructor for initialization|no viable overloaded '='")
_NOT_FUNCTIONS = {"if", "for", "while", "switch", "return", "sizeof", "decltype", "catch", "alignas", "constexpr"}
_DEFINITION = re.compile(r"\b(\w+)\s*\(")
_SCALARS = r"(?:bool|u?char|u?short|u?int|u?long|half|bfloat|float|u?int(?:8|16|32|64)_t|size_t|b?float16_t)"
_FOREIGN = re.compile(
    r"\b(?:double|goto|new|dynamic_cast|typeid|throw|try|catch|virtual|thread_local|std\s*::)(?!\w)"
    r"|(?<!=)(?<!= )\bdelete\b"
)
_QUALIFIED = re.compile(r"\b(?:" + "|".join(SPACES) + r")\b")


@dataclass(frozen=True)
class Complaint:
    """One thing that a Metal compiler would refuse, and the line of kernel text it is on."""

    line: int
    message: str


def _diagnostics(text: str, *defines: str) -> Iterator[tuple[Complaint, str]]:
    """Errors inside the kernel's own text, each with the notes that follow it."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.cpp")
        source.write_text(text)
        done = subprocess.run(
            [*syntax_command(), *(f"-D{name}" for name in defines), str(source)],
            capture_output=True,
            text=True,
            check=False,
        )
    current: Complaint | None = None
    notes: list[str] = []
    for line in done.stderr.splitlines():
        found = _ERROR.match(line)
        if found or ": error: " in line:
            if current:
                yield current, "\n".join(notes)
            current = Complaint(int(found.group(1)), found.group(2)) if found else None
            notes = []
        else:
            notes.append(line)
    if current:
        yield current, "\n".join(notes)


def _with_reason(complaint: Complaint, notes: str) -> Complaint:
    """The complaint with what clang's first note says about why nothing fits."""
    reason = re.search(r"not viable: (.*)", notes)
    text = complaint.message + (f": {reason.group(1)}" if reason else "")
    for number, space in _CLANG_SPACES.items():
        text = text.replace(f"__attribute__((address_space({number})))", space).replace(
            f"address space '{number}'", space
        )
    return Complaint(complaint.line, text)


def _wrong_spaces(unit: str) -> Iterator[Complaint]:
    for complaint, notes in _diagnostics(unit, "SIM_ADDRESS_SPACES"):
        # clang cannot copy a struct out of an address space; Metal can.
        copies = _COPIES_A_STRUCT.search(complaint.message) and "implicit copy" in notes
        # Nor can it give an array parameter the space that its elements lie in.
        copies = copies or "parameter may not be qualified" in complaint.message
        if complaint.message.startswith("variable length array"):
            yield Complaint(complaint.line, "Metal has no arrays of variable length")
        elif not copies and _ABOUT_SPACES.search(complaint.message + notes):
            yield _with_reason(complaint, notes)


def _implicit_bfloats(unit: str) -> Iterator[Complaint]:
    for complaint, notes in _diagnostics(unit, "SIM_STRICT_BFLOAT"):
        if _ABOUT_BFLOAT.search(complaint.message + notes) and "vector element" not in complaint.message:
            yield _with_reason(complaint, notes)


def _closing(text: str, at: int) -> int:
    depth = 1
    while at < len(text) and depth:
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at


def _parameters(text: str) -> Iterator[tuple[str, int, str]]:
    """(function, position, parameter) for every parameter of every function that is defined in the text."""
    for found in _DEFINITION.finditer(text):
        end = _closing(text, found.end())
        defines = re.match(r"\s*(?:const\s*)?(?:thread\s*)?\{", text[end:])
        before = text[: found.start()].rstrip()
        initializes_member = before.endswith(",") or (before.endswith(":") and not before.endswith("::"))
        if found.group(1) in _NOT_FUNCTIONS or not defines or initializes_member:
            continue
        depth, start = 0, found.end()
        for at in range(found.end(), end):
            c = text[at]
            depth += {"(": 1, "<": 1, "[": 1, ")": -1, ">": -1, "]": -1}.get(c, 0)
            if (c == "," and depth == 0) or at == end - 1:
                yield found.group(1), start, text[start:at]
                start = at + 1


def _without_brackets(text: str) -> str:
    while (shorter := re.sub(r"<[^<>]*>|\[\[.*?\]\]", "", text, flags=re.S)) != text:
        text = shorter
    return text


def _unqualified(text: str) -> Iterator[Complaint]:
    """Pointers and references that name no address space. (Array parameters need none: they are the thread's.)"""
    text = blank_comments(text)
    for function, at, parameter in _parameters(text):
        plain = _without_brackets(parameter)
        if re.search(r"[*&]", plain) and not _QUALIFIED.search(plain):
            name = " ".join(parameter.split())
            line = text.count("\n", 0, at + len(parameter) - len(parameter.lstrip())) + 1
            yield Complaint(
                line, f"parameter '{name}' of '{function}' names no address space: add one of {', '.join(SPACES)}"
            )
    types = "|".join([_SCALARS, *set(re.findall(r"\btypename\s+(\w+)", text))])
    for found in re.finditer(
        rf"(?<=[;{{}}\n])[ \t]*(?:const\s+)?\b(?:{types})[234]?\s*(?:const\s*)?[*&]\s*(\w+)\s*=[^=]", text
    ):
        line = text.count("\n", 0, found.start(1)) + 1
        yield Complaint(line, f"'{found.group(1)}' is a pointer or reference that names no address space")


def _foreign_words(text: str) -> Iterator[Complaint]:
    """C++ that Metal leaves out."""
    for found in _FOREIGN.finditer(blank_comments(text)):
        yield Complaint(text.count("\n", 0, found.start()) + 1, f"Metal has no '{found.group().strip()}'")


def _misplaced(text: str) -> Iterator[Complaint]:
    """Variables in a scope where Metal does not allow them."""
    text = blank_comments(text)
    for declaration in without_constant(text):
        line = text.count("\n", 0, declaration.at) + 1
        yield Complaint(line, "a variable at program scope, or a static member, must be `constant`")
    for declaration in threadgroup_outside_kernel(text):
        line = text.count("\n", 0, declaration.at) + 1
        yield Complaint(line, "a threadgroup variable can only be declared in the kernel: pass a pointer to it")


def complaints(text: str, preamble: str) -> list[Complaint]:
    """What is wrong with kernel text that compiles as C++, in the order of lines."""
    unit = preamble + '#line 1 "kernel"\n' + to_cpp(text)
    found = [*_foreign_words(text), *_unqualified(text), *_misplaced(text)]
    if "complex64_t" not in text:
        found += _wrong_spaces(unit)
    if "bfloat" in text:
        found += _implicit_bfloats(unit)
    return sorted(found, key=lambda c: c.line)


@cache
def _own_text() -> str:
    return "".join(Path(__file__).with_name(name).read_text() for name in ("static_pass.py", "rewrite.py", "scopes.py"))


def check(name: str, text: str, preamble: str) -> None:
    """Refuse kernel text that a Metal compiler would refuse; remembered by content.

    Raises:
        KernelCompileError: with one sentence for each complaint and the line it is about.
    """
    passed = cache_folder() / f"{content_key('static pass', _own_text(), preamble, text)}.ok"
    if passed.exists():
        return
    found = complaints(text, preamble)
    if found:
        lines = text.splitlines()
        said = [f'{name}: line {c.line}: {c.message} ("{lines[c.line - 1].strip()[:90]}")' for c in found[:8]]
        raise KernelCompileError("\n".join(said))
    passed.parent.mkdir(parents=True, exist_ok=True)
    passed.touch()
