"""Kernel text as tokens with matched brackets, to find functions, calls, loops and the ends of statements."""

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
    """The tokens of a text without comments. `directives` are its preprocessor lines; they are not tokens."""

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
        """Return the token at index i; an empty text if there is none."""
        return self._texts[i] if 0 <= i < len(self._texts) else ""

    def is_word(self, i: int) -> bool:
        """Whether token i is a name or a keyword."""
        return 0 <= i < len(self._found) and self._found[i].lastgroup == "word"

    def start(self, i: int) -> int:
        """Return where token i starts in the text."""
        return self._found[i].start()

    def end(self, i: int) -> int:
        """Return where token i ends in the text."""
        return self._found[i].end()

    def loops(self) -> Iterator[int]:
        """Return the indices of all `for`, `while` and `do`, with the `while` that ends a `do`."""
        return (i for i in range(len(self)) if self[i] in _LOOPS)

    def pragma_before(self, i: int) -> re.Match[str] | None:
        """Return the `#pragma` directly before token i; None if there is none."""
        for line in self.directives:
            if line.end() <= self.start(i) and not self._text[line.end() : self.start(i)].strip():
                return line if re.match(r"\s*#\s*pragma\b", line.group()) else None
        return None

    @cached_property
    def match(self) -> dict[int, int]:
        """The index of each bracket's partner. A bracket that conditional compilation leaves without a partner is not
        in it.
        """
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
        """Return the index of the parenthesis that opens a call of the name at i; None if there is no call. Template
        arguments may come between.
        """
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
        """Return the index after the statement that begins at i.

        Raises:
            KeyError: the brackets of the statement do not match.
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
