"""Mark a kernel's text so that the simulator knows where a thread is: the iteration of each loop, and the calls so far.

Lanes meet in an operation if they reached it on the same path. Marked are the loops that contain an operation among
lanes, directly or through a function of the text, and those functions. Such a function gets one more parameter, the
place of the call. Other loops do not change. The last line of a kernel separates the lanes that reach it from those
that return earlier. The marks are classes of shim/sim/paths.h.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

_MEETING = re.compile(
    r"\b(?:(?:simd|quad|simdgroup)_(?!lane|group|matrix|size|id)\w+|(?:threadgroup|simdgroup)_barrier)\b"
)
_MACRO = re.compile(r"\s*#\s*define\s+(\w+)(.*)", re.S)
_CONTROL = {"if", "for", "while", "switch", "return", "constexpr", "sizeof", "decltype", "catch", "SIM_THREADGROUP"}
_NOT_A_TYPE = {"return", "else", "do", "new", "case", "goto"}
_AFTER_PARAMETERS = {"const", "noexcept", "thread", "device", "constant", "threadgroup"}
_LOOP = "if (metal::__loop sim_loop; false) {} else "
_FRAME = " metal::__frame sim_frame(sim_site);"
_END = " metal::__at_end(); "
_PLACE = "metal::__site sim_site = metal::__site::here()"


@lru_cache(maxsize=256)
def mark_paths(text: str) -> str:
    """Return a kernel's text with the marks. Line numbers do not change. Loops with unmatched brackets get no marks."""
    tokens, marks = KernelTokens(text), _Marks()
    functions = list(_find_functions(tokens))
    calls = _Calls(tokens, functions)
    if not calls.meeting:
        return text
    placed = _functions_that_can_get_a_site(tokens, functions, calls)
    for f in functions:
        if f.name in placed:
            _mark_function(tokens, marks, f)
        if f.kernel:
            marks.insert(tokens.start(tokens.partners[f.body]), _END)
    ends_of_do: set[int] = set()
    for i in tokens.loops():
        try:
            after = tokens.after_statement(i)
            if tokens[i] == "do":
                ends_of_do.add(tokens.after_statement(i + 1))
        except KeyError:
            continue
        if i not in ends_of_do and calls.can_meet(i, after):
            _mark_loop(tokens, marks, i)
    return marks.apply(text)


@dataclass(frozen=True)
class _Function:
    """A function that the text defines. `at`, `opens` and `body` are the tokens of its name and of the brackets that
    open its parameters and its body.

    `plain`: whether it can have one more parameter. A `kernel`, a constexpr function, an operator, a lambda and a
    function with a parameter pack cannot.
    """

    name: str
    at: int
    opens: int
    body: int
    plain: bool
    kernel: bool = False


def _find_functions(tokens: KernelTokens) -> Iterator[_Function]:
    for body in sorted(tokens.partners):
        end = body - 1
        while tokens[end] in _AFTER_PARAMETERS:
            end -= 1
        if tokens[body] != "{" or tokens[end] != ")" or end not in tokens.partners:
            continue
        opens = tokens.partners[end]
        at = opens - 1
        if tokens[at] == "]" and at in tokens.partners:  # a lambda goes by the name of its variable
            at = tokens.partners[at] - 2
            if tokens[at + 1] == "=":
                yield _Function(tokens[at], at, opens, body, plain=False)
        elif tokens.is_word(at) and tokens[at] not in _CONTROL:
            start = at
            while start > 0 and tokens[start - 1] not in (";", "}", "{"):
                start -= 1
            before = {tokens[i] for i in range(start, at)}
            typed = tokens[at - 1] in (">", "*", "&") or (tokens.is_word(at - 1) and tokens[at - 1] not in _NOT_A_TYPE)
            pack = any(tokens[i] == "." == tokens[i + 1] for i in range(opens, end))
            plain = start < at and typed and not pack and not {"kernel", "constexpr", "operator"} & before
            yield _Function(tokens[at], at, opens, body, plain, "kernel" in before)


class _Calls:
    """The calls in a text, and the names whose calls lead to a cross-lane operation."""

    def __init__(self, tokens: KernelTokens, functions: list[_Function]) -> None:
        self.at = [i for i in range(len(tokens)) if tokens.is_word(i) and tokens.call_opens(i) is not None]
        self._names = [tokens[i] for i in self.at]
        macros = [found.groups() for line in tokens.directives if (found := _MACRO.match(line.group()))]
        self.meeting = {name for name in self._names if _MEETING.fullmatch(name)}
        self.meeting |= {name for name, body in macros if _MEETING.search(body)}
        while more := {
            f.name for f in functions if f.name not in self.meeting and self.can_meet(f.body, tokens.partners[f.body])
        }:
            self.meeting |= more

    def can_meet(self, start: int, end: int) -> bool:
        """Whether a call between two tokens leads to a cross-lane operation."""
        return any(
            name in self.meeting for name in self._names[bisect_left(self.at, start) : bisect_left(self.at, end)]
        )


class _Marks:
    """Insertions and replacements in a text; `apply` makes them."""

    def __init__(self) -> None:
        self._edits: list[tuple[int, int, str]] = []

    def insert(self, at: int, text: str) -> None:
        self._edits.append((at, at, text))

    def replace(self, start: int, end: int, text: str) -> None:
        self._edits.append((start, end, text))

    def apply(self, text: str) -> str:
        out, at = [], 0
        for start, end, new in sorted(self._edits, key=lambda edit: edit[:2]):
            out += [text[at:start], new]
            at = end
        return "".join(out) + text[at:]


def _functions_that_can_get_a_site(tokens: KernelTokens, functions: list[_Function], calls: _Calls) -> set[str]:
    """Return the names of functions that can get a call-site parameter: those only defined, or called in functions."""
    definitions = {f.at for f in functions}
    bodies = [(f.body, tokens.partners[f.body]) for f in functions]
    called = set(calls.at)
    names = {f.name for f in functions} & calls.meeting - {f.name for f in functions if not f.plain}
    return names - {
        tokens[i]
        for i in range(len(tokens))
        if tokens[i] in names
        and i not in definitions
        and (i not in called or not any(start < i < end for start, end in bodies))
    }


def _mark_function(tokens: KernelTokens, marks: _Marks, f: _Function) -> None:
    closes = tokens.partners[f.opens]
    if closes == f.opens + 1 or (closes == f.opens + 2 and tokens[f.opens + 1] == "void"):
        marks.replace(tokens.end(f.opens), tokens.start(closes), _PLACE)
    else:
        marks.insert(tokens.start(closes), ", " + _PLACE)
    marks.insert(tokens.end(f.body), _FRAME)


def _mark_start(tokens: KernelTokens, marks: _Marks, i: int) -> None:
    """Insert the mark before the loop, and before its pragma or macro, which must stay next to the loop."""
    while tokens.is_word(i - 1) and tokens[i - 1].isupper():
        i -= 1
    if tokens[i - 1] == ")" and tokens[tokens.partners.get(i - 1, 0) - 1] == "_Pragma":
        i = tokens.partners[i - 1] - 1
    if pragma := tokens.pragma_before(i):
        words = re.sub(r"\s*#\s*pragma\s+|\\\n", " ", pragma.group()).strip()
        marks.replace(pragma.start(), pragma.end(), f'{_LOOP}_Pragma("{words}")' + "\n" * pragma.group().count("\n"))
    else:
        marks.insert(tokens.start(i), _LOOP)


def _mark_condition(tokens: KernelTokens, marks: _Marks, before: int, after: int, body: int) -> None:
    """Insert the call that begins an iteration in the condition, or in the body if the condition is a declaration."""
    if tokens.is_word(before + 1) and tokens.is_word(before + 2):
        _mark_body(tokens, marks, body)
    elif after == before + 1:
        marks.insert(tokens.start(after), " sim_loop.next()")
    else:
        marks.insert(tokens.end(before), " sim_loop.next() && (")
        marks.insert(tokens.start(after), ")")


def _mark_body(tokens: KernelTokens, marks: _Marks, at: int) -> None:
    """Insert the call that begins an iteration at the start of the loop's body."""
    if tokens[at] == "{":
        marks.insert(tokens.end(at), " sim_loop.next();")
    else:
        marks.insert(tokens.start(at), " if (!sim_loop.next()) {} else ")


def _mark_loop(tokens: KernelTokens, marks: _Marks, i: int) -> None:
    _mark_start(tokens, marks, i)
    if tokens[i] == "do":
        return _mark_body(tokens, marks, i + 1)
    closes = tokens.partners[i + 1]
    if tokens[i] == "while":
        return _mark_condition(tokens, marks, i + 1, closes, closes + 1)
    semicolons, at = [], i + 2
    while at < closes:
        if tokens[at] == ";":
            semicolons.append(at)
        at = tokens.partners[at] + 1 if tokens[at] in ("(", "[", "{") else at + 1
    if len(semicolons) == 2:
        return _mark_condition(tokens, marks, semicolons[0], semicolons[1], closes + 1)
    return _mark_body(tokens, marks, closes + 1)


# Kernel text as tokens with matched brackets, to find functions, calls, loops and the ends of statements.

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


class KernelTokens:
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
        """Return the indices of all `for`, `while` and `do`, including each `while` that ends a `do`."""
        return (i for i in range(len(self)) if self[i] in _LOOPS)

    def pragma_before(self, i: int) -> re.Match[str] | None:
        """Return the `#pragma` directly before token i; None if there is none."""
        for line in self.directives:
            if line.end() <= self.start(i) and not self._text[line.end() : self.start(i)].strip():
                return line if re.match(r"\s*#\s*pragma\b", line.group()) else None
        return None

    @cached_property
    def partners(self) -> dict[int, int]:
        """The index of each bracket's partner. Brackets that conditional compilation leaves unpaired are not in it."""
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
        """Return the index of the parenthesis that opens a call of the name at i, after template arguments; or None."""
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
        return at if self[at] == "(" and at in self.partners else None

    def after_statement(self, i: int) -> int:
        """Return the index after the statement that begins at i.

        Raises:
            KeyError: the brackets of the statement do not match.
        """
        word = self[i]
        if word == "{":
            return self.partners[i] + 1
        if word in ("for", "while", "switch"):
            return self.after_statement(self.partners[i + 1] + 1)
        if word == "if":
            after = self.after_statement(self.partners[i + 1 + (self[i + 1] == "constexpr")] + 1)
            return self.after_statement(after + 1) if self[after] == "else" else after
        if word == "do":
            return self.partners[self.after_statement(i + 1) + 1] + 2
        if word.isupper() and self[i + 1] in _LOOPS:
            return self.after_statement(i + 1)
        at = i
        while at < len(self) and self[at] != ";":
            at = self.partners[at] + 1 if self[at] in _OPENS else at + 1
        return at + 1
