"""AnswerReader: the text of an answer as it arrives, for parsers that read it in order."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from functools import cache
from typing import Any, TypeVar

from cortexmlx.structured.tools import CallDelta, ToolCall, loaded

T = TypeVar("T")

Reading = Generator[None, None, T]
"""A parser, or a part of one. It yields when it needs more text, and returns what it has read."""

MOST_HEADER = 1024
"""How many characters the name of a tool or of an argument, with what is around it, may have. More are no call."""

WIDEST = 64
"""How many blanks around a tag belong to it at most. As many are held back until the next text is known."""


class NotACall(Exception):
    """What began like a call is none, so it is text."""


class CutCall(Exception):
    """The answer ended within a call."""


class AnswerReader:
    """The text of one answer, of which a parser takes piece after piece, and what the parser makes of it.

    The text that belongs to no call is in `text`, the pieces of calls are in `deltas`, and complete calls in `calls`.
    Whoever feeds the reader takes the first two away. With `streamed`, pieces of a call are told as they come;
    otherwise when the call is complete.
    """

    def __init__(self, ids: Iterator[str], streamed: bool) -> None:
        self.text: list[str] = []
        self.deltas: list[CallDelta] = []
        self.calls: list[ToolCall] = []
        self.ended = False
        self._ids = ids
        self._streamed = streamed
        # What was read of `_held` stays there until more text comes: to cut it off each time takes quadratic time.
        self._held = ""
        self._at = 0
        self._call: _OpenCall | None = None
        self._since: list[str] | None = None
        self._said = False
        self.untouched = True
        """Whether nothing was said or taken yet."""
        self._before_section = 0
        self.in_section = False
        """Whether the tag that opens several calls was read, and not yet the one that closes them."""
        self.said_after_calls = False
        """Whether a text that is not blank came after the newest call."""

    # -- from outside -------------------------------------------------------------------------------------------------

    @property
    def reads_call(self) -> bool:
        """Whether a call has begun and is not complete."""
        return bool(self._since and "".join(self._since).strip())

    def add(self, text: str) -> None:
        """Append the next text of the answer."""
        self._held = self._held[self._at :] + text if self._at < len(self._held) else text
        self._at = 0

    def drop_call(self, cut: bool = False) -> None:
        """Leave the call that is being read. Its characters become text, unless it was `cut` and its pieces are told as
        they come.
        """
        if self._since is not None and not (cut and self._streamed):
            self._say("".join(self._since) + (self._rest() if cut else ""))
        self._call = self._since = None

    # -- for parsers: text --------------------------------------------------------------------------------------------

    def text_up_to(self, *tags: str) -> Reading[str]:
        """Read text up to the first of some tags. Return the tag, which is consumed; empty at the end of the answer.
        Blanks before a tag of a call are dropped, and the beginning of a tag with which an answer with calls is cut.
        """
        search = _first_of(tags).search
        clear = 0  # how many unread characters begin no tag
        while True:
            found = search(self._held, self._at + clear)
            if found is not None and found[1]:
                self._say(without_blanks(self._held[self._at : found.start()]), consumed=True)
                self.begin_calls()
                self._take(found.end())
                return found[1]
            if self.ended:
                rest = self._rest()
                cut = self.calls and any(tag.startswith(rest.strip()) for tag in ("", *tags))
                self._say("" if cut else rest)
                return ""
            end = len(self._held) if found is None else found.start()
            self._say(without_blanks(self._held[self._at : end]), consumed=True)
            clear = end - self._at
            yield

    def begins_with(self, *beginnings: str) -> Reading[str]:
        """Return the first of some texts with which the unread text begins, which is not consumed; empty if there is
        none. Of several that fit, the longest counts.
        """
        longest = max(map(len, beginnings))
        while True:
            held = self._held[self._at : self._at + longest]
            fits = [text for text in beginnings if held.startswith(text)]
            open_ = [text for text in beginnings if text.startswith(held) and text not in fits]
            if self.ended or not open_:
                return max(fits, key=len, default="")
            yield

    def next_char(self) -> Reading[str]:
        """Return the next character, which is not consumed; empty at the end of the answer."""
        while self._at == len(self._held) and not self.ended:
            yield
        return self._held[self._at : self._at + 1]

    # -- for parsers: within a call -----------------------------------------------------------------------------------

    def blanks(self) -> Reading[None]:
        """Skip blanks."""
        while (yield from self.next_char()).isspace():
            found = _INK.search(self._held, self._at)
            self._take(len(self._held) if found is None else found.start())

    def exactly(self, text: str) -> Reading[None]:
        """Skip a text. Raises NotACall if another one comes."""
        while len(self._held) - self._at < len(text) and text.startswith(self._held[self._at :]):
            self._check_end()
            yield
        if not self._held.startswith(text, self._at):
            raise NotACall(f"{text!r} is missing")
        self._take(self._at + len(text))

    def one_of(self, *texts: str) -> Reading[str]:
        """Skip one of some texts, and return it. Raises NotACall if another one comes."""
        text = yield from self.begins_with(*texts)
        if not text:
            held = self._held[self._at : self._at + max(map(len, texts))]
            if any(each.startswith(held) for each in texts):
                self._check_end()
            raise NotACall(f"none of {texts} follows")
        self._take(self._at + len(text))
        return text

    def up_to(self, tag: str) -> Reading[str]:
        """Return the text before a tag, which is consumed. Raises NotACall if it is longer than `MOST_HEADER`."""
        most = MOST_HEADER + len(tag)
        while (place := self._held.find(tag, self._at, self._at + most)) < 0:
            if len(self._held) - self._at >= most:
                raise NotACall(f"{tag!r} is missing")
            self._check_end()
            yield
        return self._take(place + len(tag))[: -len(tag)]

    def run_of(self, pattern: re.Pattern[str], most: int = MOST_HEADER) -> Reading[str]:
        """Return the longest text of characters of a class, which the pattern matches one by one; it may be empty.
        Raises NotACall if it is longer than `most`.
        """
        run = ""
        while True:
            run += self._take(pattern.match(self._held, self._at).end())  # type: ignore[union-attr]
            if len(run) > most:
                raise NotACall(f"a name has more than {most} characters")
            if self._at < len(self._held):
                return run
            self._check_end()
            yield

    def value_up_to(self, tag: str, tell: Callable[[str], None] | None = None) -> Reading[str]:
        """Return the text of any length before a tag, which is consumed. With `tell`, its pieces are told as they come,
        and it is not returned.
        """
        pieces: list[str] = []
        tell = tell or pieces.append
        search = _first_of((tag,)).search
        while (found := search(self._held, self._at)) is None or not found[1]:
            end = len(self._held) if found is None else found.start()
            if end > self._at:
                tell(self._take(end))
            self._check_end()
            yield
        tell(self._take(found.end())[: -len(tag)])
        return "".join(pieces)

    def literal(self, quotes: tuple[str, ...], ends: str, escapes: bool = False) -> Reading[str]:
        """Return the next value as it is written, up to one of the signs `ends` outside of its texts and brackets. The
        sign is not consumed. Texts stand between two of the same `quotes`; with `escapes`, a quote after a backslash
        ends none.
        """
        pieces: list[str] = []
        depth, quote = 0, ""
        outside = _first_of((*quotes, *"[](){},"))
        inside = {each: _first_of((each, "\\") if escapes else (each,)) for each in quotes}
        while True:
            found = (inside[quote] if quote else outside).search(self._held, self._at)
            if found is None or not found[1]:
                pieces.append(self._take(len(self._held) if found is None else found.start()))
                self._check_end()
                yield
                continue
            sign = found[1]
            if not quote and depth == 0 and sign in ends:
                pieces.append(self._take(found.start()))
                return "".join(pieces)
            pieces.append(self._take(found.end()))
            if sign == "\\":
                while self._at == len(self._held):
                    self._check_end()
                    yield
                pieces.append(self._take(self._at + 1))
            elif sign in quotes:
                quote = "" if quote else sign
            else:
                depth += {"[": 1, "(": 1, "{": 1, ",": 0}.get(sign, -1)
                if depth < 0:
                    raise NotACall(f"{sign!r} closes nothing")

    def next_in_section(self, section: str, call: str, end: str) -> Reading[bool]:
        """Read up to the next call between the tags `section` and `end`. Its tag `call` is consumed. Return False at
        the end of the answer. A call that is none does not hide those after it.
        """
        while True:
            if not self.in_section:
                if not (yield from self.text_up_to(section)):
                    return False
                yield from self.blanks()
                yield from self.exactly(call)
                self.in_section = True
                self._before_section = len(self.calls)
                return True
            tag = yield from self.text_up_to(call, end)
            if tag == call:
                return True
            if not tag:
                return False
            if self._before_section == len(self.calls):
                self.drop_call()  # a section without calls is text, with its tags
            self.end_calls()
            self.in_section = False

    def json_text(self) -> Reading[str]:
        """Return the JSON text that follows: an object, a list or a string. Raises NotACall if it is none of them."""
        pieces: list[str] = []
        yield from self._json(pieces.append)
        return "".join(pieces)

    def json_string(self) -> Reading[str]:
        """Return the JSON string that follows. Raises NotACall if there is none."""
        if (yield from self.next_char()) != '"':
            if self._at == len(self._held):
                self._check_end()
            raise NotACall("there is no JSON string")
        return str(json_value((yield from self.json_text())))

    # -- for parsers: calls -------------------------------------------------------------------------------------------

    def begin_calls(self) -> None:
        """Note that what follows is a call. If it turns out to be none, its characters become text."""
        self._since = []

    def begin_paragraph(self) -> None:
        """Part what is said next from the text before it."""
        if self._said:
            self.text.append("\n\n")

    def begin_call(self, name: str, id: str = "") -> None:
        """Begin a call of a tool, with the id that the model gave it, if any."""
        self._call = _OpenCall(len(self.calls), id or next(self._ids), name)
        if self._streamed:
            self.deltas.append(CallDelta(self._call.index, self._call.id, name))

    def add_arguments(self, piece: str) -> None:
        """Add a piece of the arguments of the call."""
        call = self._call
        assert call is not None
        if piece:
            call.pieces.append(piece)
            if self._streamed:
                self.deltas.append(CallDelta(call.index, arguments=piece))

    def json_arguments(self) -> Reading[None]:
        """Read the arguments of the call as a JSON object. Raises NotACall if there is none."""
        if (yield from self.next_char()) != "{":
            if self._at == len(self._held):
                self._check_end()
            raise NotACall("the arguments are no JSON object")
        yield from self._json(self.add_arguments)

    def end_call(self) -> None:
        """Complete the call. Raises NotACall if its arguments are no JSON object."""
        call = self._call
        assert call is not None
        arguments = "".join(call.pieces)
        if not isinstance(json_value(arguments), dict):
            raise NotACall("the arguments are no JSON object")
        if not self._streamed:
            self.deltas += [CallDelta(call.index, call.id, call.name), CallDelta(call.index, arguments=arguments)]
        self.calls.append(ToolCall(call.id, call.name, arguments))
        self.said_after_calls = False
        self._call = None
        self._since = []

    def end_calls(self) -> None:
        """Note that what follows is no part of a call."""
        self._since = None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _say(self, text: str, consumed: bool = False) -> None:
        """Tell a text, which is the next unread one if it is `consumed`."""
        if text:
            self._said = True
            self.untouched = False
            self.said_after_calls = self.said_after_calls or not text.isspace()
            self.text.append(text)
        if consumed:
            self._at += len(text)

    def _take(self, end: int) -> str:
        """Consume the characters before the place `end`."""
        self.untouched = False
        taken = self._held[self._at : end]
        self._at = end
        if self._since is not None:
            self._since.append(taken)
        return taken

    def _rest(self) -> str:
        """Consume all that is left."""
        rest, self._held, self._at = self._held[self._at :], "", 0
        return rest

    def _check_end(self) -> None:
        """Raise CutCall if no more text comes."""
        if self.ended:
            raise CutCall

    def _json(self, tell: Callable[[str], None]) -> Reading[None]:
        """Read one JSON text, and tell its pieces as they come."""
        depth, quoted, escaped, whole = 0, False, False, False
        while not whole:
            end = self._at
            while end < len(self._held) and not whole:
                char = self._held[end]
                end += 1
                if escaped:
                    escaped = False
                elif quoted:
                    quoted, escaped = char != '"', char == "\\"
                elif char == '"':
                    quoted = True
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                whole = depth <= 0 and not quoted and not escaped
            if end > self._at:
                tell(self._take(end))
            if not whole:
                self._check_end()
                yield


class _OpenCall:
    """A call that is being read."""

    def __init__(self, index: int, id: str, name: str) -> None:
        self.index = index
        self.id = id
        self.name = name
        self.pieces: list[str] = []


def json_value(text: str) -> object:
    """Return the value of a JSON text. Raises NotACall, also for NaN, infinities, and keys that come twice: readers of
    JSON differ in which of them counts.
    """
    try:
        return loaded(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise NotACall(str(error)) from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found


_INK = re.compile(r"\S")


@cache
def _first_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Return what finds the first of some tags, as its group 1, or else the beginning of one at the end of the text."""
    ordered = sorted(tags, key=len, reverse=True)
    whole = "|".join(map(re.escape, ordered)) or "(?!)"
    return re.compile("|".join([f"({whole})", *(f"{_beginning(tag[:-1])}\\Z" for tag in ordered if len(tag) > 1)]))


def _beginning(text: str) -> str:
    """Return the expression of a text, or of its first characters."""
    inner = f"(?:{_beginning(text[1:])})?" if len(text) > 1 else ""
    return f"{re.escape(text[0])}{inner}"


def without_blanks(text: str) -> str:
    """Return a text without the blanks at its end, of which at most `WIDEST` are removed."""
    rest = text.rstrip()
    return rest if len(text) - len(rest) <= WIDEST else text[: len(text) - WIDEST]


def beginning_of(tag: str, text: str, start: int = 0) -> int:
    """Return how many characters at the end of `text`, after the place `start`, could begin `tag`."""
    place = text.find(tag[0], max(start, len(text) - len(tag) + 1))
    while place >= 0:
        if tag.startswith(text[place:]):
            return len(text) - place
        place = text.find(tag[0], place + 1)
    return 0
