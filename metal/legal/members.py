"""`this` in Metal points to thread memory, in OpenCL to any: what a member function gives out of itself is said to be
the thread's, as its declaration says.

- `return member;` in a function that returns `thread T&` goes through `__thread_memory`, which takes no other space;
- `reinterpret_cast<thread T*>(...)` becomes a cast that OpenCL allows out of any memory, but not out of `device`.
"""

import re

from cortexmlx.metal.legal.msl import closing

_HEADER = re.compile(
    r"\bthread\s+(?!const\s*\()[^;{}()=\[\]]*&\s*(?:[\w:]+|operator\s*[^\s\w(]+|operator\s*\(\s*\))\s*\("
)
_RETURN = re.compile(r"\breturn\b(\s+)([^;{}]+);")
_REINTERPRETED = re.compile(
    r"\breinterpret_cast\s*<((?:[^<>]|<[^<>]*>)*\bthread\b(?:[^<>]|<[^<>]*>)*[*&]\s*)>\s*(?=\()"
)
_BODY = re.compile(r"[^;{}()]*\{")


def in_thread_memory(text: str) -> str:
    """The text with the results of its functions and its casts in the thread's memory. Lines stay."""
    text = _REINTERPRETED.sub(r"(\1)", text)
    out, at = [], 0
    for header in _HEADER.finditer(text):
        if header.start() < at:
            continue
        parameters_end = closing(text, header.end() - 1)
        body = _BODY.match(text, parameters_end + 1) if parameters_end else None
        end = closing(text, body.end() - 1) if body else None
        if body is None or end is None:
            continue
        out += [text[at : body.end()], _RETURN.sub(r"return\1__thread_memory(\2);", text[body.end() : end])]
        at = end
    return "".join(out) + text[at:]
