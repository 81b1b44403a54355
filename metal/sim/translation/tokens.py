"""Kernel text as tokens with their brackets matched: to find functions, calls, loops and where statements end."""

import re
from collections.abc import Iterator
from functools import cached_property

_TOKEN = re.compile(
    r"(?P<directive>^[ \t]*\#(?:[^\n\\]|\\.|\\\n)*)"
    r"|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)"
    r'|(?P<string>"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')'
    r"|(?P<sign>::|->|&&|\|\||\S)",
    re.M,
)
_OPENS = {"(": ")", "[": "]", "{": "}"}
_IN_TEMPLATE_ARGUMENTS = {",", "::", "*", "&", "+", "-", "/", "(", ")", "<", ">", "."}
_LOOPS = {"for", "while", "do"}


class Tokens:
    """A text without comments. `directives` are its preprocessor lines, which are no tokens."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._found: list[re.Match[str]] = []
        self.directives: list[re.Match[str]] = []
        for found in _TOKEN.finditer(text):
            (self.directives if found.lastgroup == "directive" else self._found).append(found)
        self._texts = [found.group() for found in self._found]

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, i: int) -> str:
        """The token at index i; nothing outside."""
        return self._texts[i] if 0 <= i < len(self._texts) else ""

    def is_word(self, i: int) -> bool:
        """Whether it is a name or a keyword."""
        return 0 <= i < len(self._found) and self._found[i].lastgroup == "word"

    def start(self, i: int) -> int:
        """Where it begins in the text."""
        return self._found[i].start()

    def end(self, i: int) -> int:
        """Where it ends in the text."""
        return self._found[i].end()

    def loops(self) -> Iterator[int]:
        """Where loops begin (and, for `do`, where its `while` stands)."""
        return (i for i in range(len(self)) if self[i] in _LOOPS)

    def pragma_before(self, i: int) -> re.Match[str] | None:
        """The `#pragma` that stands directly before a token."""
        for line in self.directives:
            if line.end() <= self.start(i) and not self._text[line.end() : self.start(i)].strip():
                return line if re.match(r"\s*#\s*pragma\b", line.group()) else None
        return None

    @cached_property
    def match(self) -> dict[int, int]:
        """For each bracket the index of its partner. One that conditional compilation leaves alone has none."""
        out: dict[int, int] = {}
        open_ones: list[int] = []
        for i in range(len(self)):
            if self[i] in _OPENS:
                open_ones.append(i)
            elif self[i] in _OPENS.values():
                if self[i] == "}":
                    while open_ones and self[open_ones[-1]] != "{":
                        open_ones.pop()
                if open_ones and _OPENS[self[open_ones[-1]]] == self[i]:
                    start = open_ones.pop()
                    out[start], out[i] = i, start
        return out

    def call_opens(self, i: int) -> int | None:
        """The opening parenthesis of a call of the name at i, with or without template arguments."""
        at = i + 1
        if self[at] == "<":
            depth = 0
            while at < min(i + 80, len(self)):
                depth += {"<": 1, ">": -1}.get(self[at], 0)
                at += 1
                if depth == 0:
                    break
                if not (self.is_word(at) or self[at][:1].isdigit() or self[at] in _IN_TEMPLATE_ARGUMENTS):
                    return None
        return at if self[at] == "(" and at in self.match else None

    def after_statement(self, i: int) -> int:
        """The index after the statement that begins at i.

        Raises:
            KeyError: its brackets do not match.
        """
        word = self[i]
        if word == "{":
            return self.match[i] + 1
        if word in ("for", "while", "switch"):
            return self.after_statement(self.match[i + 1] + 1)
        if word == "if":
            after = self.after_statement(self.match[i + 1 + (self[i + 1] == "constexpr")] + 1)
            return self.after_statement(after + 1) if self[after] == "else" else after
        if word == "do":
            return self.match[self.after_statement(i + 1) + 1] + 2
        if word.isupper() and self[i + 1] in _LOOPS:
            return self.after_statement(i + 1)
        at = i
        while at < len(self) and self[at] != ";":
            at = self.match[at] + 1 if self[at] in _OPENS else at + 1
        return at + 1
