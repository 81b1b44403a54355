"""From Metal text to C++ text: the few constructs that macros cannot carry over. Line numbers stay as they are."""

import re
from collections.abc import Iterator

_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
_THREADGROUP = re.compile(r"\bthreadgroup\b([^;{}]*);")
# A floating literal without a suffix is a float in Metal.
_DOUBLE_LITERAL = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(?![\w.])")
_HOST_NAME = re.compile(r"template\s*\[\[host_name\([^\]]*\)\]\]\s*\[\[kernel\]\]\s*(decltype\()")


def blank_comments(text: str) -> str:
    """The text with comments replaced by spaces; line breaks and string literals stay."""

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)

    return _COMMENT.sub(blank, text)


def _split_top(text: str, separator: str) -> Iterator[str]:
    depth, start = 0, 0
    for i, c in enumerate(text):
        if c in "<([{":
            depth += 1
        elif c in ">)]}":
            depth -= 1
        elif c == separator and depth == 0:
            yield text[start:i]
            start = i + 1
    yield text[start:]


def _outside_brackets(text: str) -> str:
    out, depth = [], 0
    for c in text:
        if c in "<[(":
            depth += 1
        elif c in ">])":
            depth -= 1
        elif depth == 0:
            out.append(c)
    return "".join(out)


def _starts_statement(text: str, at: int) -> bool:
    before = text[:at].rstrip()
    return not before or before[-1] in ";{}:" or before.rsplit("\n", 1)[-1].lstrip().startswith("#")


def _threadgroup_variable(match: re.Match[str]) -> str:
    """`threadgroup T x[N], y;` becomes references into the threadgroup's memory; pointers are left alone."""
    rest = match.group(1)
    plain = _outside_brackets(rest)
    if not _starts_statement(match.string, match.start()) or "*" in plain or "&" in plain or "=" in plain:
        return match.group()
    first, *others = _split_top(rest.strip(), ",")
    head = re.match(r"(?P<type>.*?[\s>])(?P<name>\w+)\s*(?P<dims>(?:\[.*\])?)\s*$", first.strip(), re.S)
    if head is None:
        return match.group()
    out = []
    for declarator in [first.strip()[head.start("name") :], *others]:
        parts = re.match(r"\s*(\w+)\s*((?:\[.*\])?)\s*$", declarator, re.S)
        if parts is None:
            return match.group()
        name, dims = parts.groups()
        out.append(f"SIM_THREADGROUP({name}, ({head.group('type').strip()}), {dims})")
    return _keep_lines(" ".join(out), match.group())


def _keep_lines(new: str, old: str) -> str:
    return new + "\n" * (old.count("\n") - new.count("\n"))


def to_cpp(text: str) -> str:
    """Metal kernel text as C++ that the shim headers understand."""
    text = blank_comments(text)
    text = re.sub(r"\[\[\s*threadgroup\b", "[[sim_threadgroup", text)
    text = _THREADGROUP.sub(_threadgroup_variable, text)
    text = _DOUBLE_LITERAL.sub(r"\1f", text)
    return _HOST_NAME.sub(r"template \1", text)
