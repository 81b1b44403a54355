"""`this` in Metal points to thread memory, in OpenCL to any: what a member function gives out of itself is said to be
the thread's, as its declaration says.

- `return member;` in a function that returns `thread T&` goes through `__thread_memory`, which takes no other space;
- `reinterpret_cast<thread T*>(...)` becomes a cast that OpenCL allows out of any memory, but not out of `device`.
"""

import re

_HEADER = re.compile(
    r"\bthread\s+(?!const\s*\()[^;{}()=\[\]]*&\s*(?:[\w:]+|operator\s*[^\s\w(]+|operator\s*\(\s*\))\s*\("
)
_RETURN = re.compile(r"\breturn\b(\s+)([^;{}]+);")
_REINTERPRETED = re.compile(
    r"\breinterpret_cast\s*<((?:[^<>]|<[^<>]*>)*\bthread\b(?:[^<>]|<[^<>]*>)*[*&]\s*)>\s*(?=\()"
)
_BODY = re.compile(r"[^;{}()]*\{")


def _closing(text: str, at: int, opening: str, closing: str) -> int:
    """The position after the bracket that closes the one before `at`."""
    depth = 1
    while at < len(text) and depth:
        depth += {opening: 1, closing: -1}.get(text[at], 0)
        at += 1
    return at


def in_thread_memory(text: str) -> str:
    """The text with the results of its functions and its casts in the thread's memory. Lines stay."""
    text = _REINTERPRETED.sub(r"(\1)", text)
    out, at = [], 0
    for header in _HEADER.finditer(text):
        if header.start() < at:
            continue
        after = _closing(text, header.end(), "(", ")")
        body = _BODY.match(text, after)
        if body is None:
            continue
        end = _closing(text, body.end(), "{", "}")
        out += [text[at : body.end()], _RETURN.sub(r"return\1__thread_memory(\2);", text[body.end() : end])]
        at = end
    return "".join(out) + text[at:]
