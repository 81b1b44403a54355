"""AnswerReader: the text of an answer as it arrives, for the parsers of tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from functools import cache
from typing import Any, TypeVar

from cortexmlx.structured.tools import CallDelta, ToolCall, load_json

T = TypeVar("T")

Reading = Generator[None, None, T]
"""A parser, or a part of one. It yields when it needs more text, and returns what it has read."""

MOST_HEADER = 1024
"""How many characters the name of a tool or of an argument, with what is around it, may have. More are no call."""

MOST_TAG_BLANKS = 64
"""How many blanks around a tag belong to it at most. As many are held back until the next text is known."""


class NotACall(Exception):
    """What began like a tool call is none, so it is text."""


class TruncatedCall(Exception):
    """The answer ended in the middle of a tool call."""


class AnswerReader:
    """Reads the text of one answer as it arrives, and collects the text and the calls that a parser finds in it.

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
    def is_in_call(self) -> bool:
        """Whether a call has begun and is not complete."""
        return bool(self._since and "".join(self._since).strip())

    def add(self, text: str) -> None:
        """Append the next text of the answer."""
        self._held = self._held[self._at :] + text if self._at < len(self._held) else text
        self._at = 0

    def drop_call(self, cut: bool = False) -> None:
        """Give up the call that is being read. Its characters become text, unless the answer was `cut` within it and
        its pieces were streamed already.
        """
        if self._since is not None and not (cut and self._streamed):
            self._add_text("".join(self._since) + (self._consume_rest() if cut else ""))
        self._call = self._since = None

    # -- for parsers: text --------------------------------------------------------------------------------------------

    def read_text_up_to(self, *tags: str) -> Reading[str]:
        """Read text up to the first of some tags. Return the tag, which is consumed; empty at the end of the answer.
        Blanks before a tag of a call are dropped, and the beginning of a tag with which an answer with calls is
        cut.
        """
        search = _tag_pattern(tags).search
        clear = 0  # how many unread characters begin no tag
        while True:
            found = search(self._held, self._at + clear)
            if found is not None and found[1]:
                self._add_text(strip_blanks(self._held[self._at : found.start()]), consumed=True)
                self.begin_calls()
                self._consume(found.end())
                return found[1]
            if self.ended:
                rest = self._consume_rest()
                cut = self.calls and any(tag.startswith(rest.strip()) for tag in ("", *tags))
                self._add_text("" if cut else rest)
                return ""
            end = len(self._held) if found is None else found.start()
            self._add_text(strip_blanks(self._held[self._at : end]), consumed=True)
            clear = end - self._at
            yield

    def peek_one_of(self, *beginnings: str) -> Reading[str]:
        """Return which of some texts comes next, without consuming it; empty if none does. Of several that fit, the
        longest counts.
        """
        longest = max(map(len, beginnings))
        while True:
            held = self._held[self._at : self._at + longest]
            fits = [text for text in beginnings if held.startswith(text)]
            open_ = [text for text in beginnings if text.startswith(held) and text not in fits]
            if self.ended or not open_:
                return max(fits, key=len, default="")
            yield

    def peek_char(self) -> Reading[str]:
        """Return the next character, without consuming it; empty at the end of the answer."""
        while self._at == len(self._held) and not self.ended:
            yield
        return self._held[self._at : self._at + 1]

    # -- for parsers: within a call -----------------------------------------------------------------------------------

    def skip_blanks(self) -> Reading[None]:
        """Skip blanks."""
        while (yield from self.peek_char()).isspace():
            found = _NOT_BLANK.search(self._held, self._at)
            self._consume(len(self._held) if found is None else found.start())

    def skip_text(self, text: str) -> Reading[None]:
        """Skip a text that must come next. Raises NotACall if another one comes."""
        while len(self._held) - self._at < len(text) and text.startswith(self._held[self._at :]):
            self._raise_if_ended()
            yield
        if not self._held.startswith(text, self._at):
            raise NotACall(f"{text!r} is missing")
        self._consume(self._at + len(text))

    def read_one_of(self, *texts: str) -> Reading[str]:
        """Read one of some texts, and return it. Raises NotACall if another one comes."""
        text = yield from self.peek_one_of(*texts)
        if not text:
            held = self._held[self._at : self._at + max(map(len, texts))]
            if any(each.startswith(held) for each in texts):
                self._raise_if_ended()
            raise NotACall(f"none of {texts} follows")
        self._consume(self._at + len(text))
        return text

    def read_up_to(self, tag: str) -> Reading[str]:
        """Return the text before a tag, and consume both. Raises NotACall if it is longer than `MOST_HEADER`."""
        most = MOST_HEADER + len(tag)
        while (place := self._held.find(tag, self._at, self._at + most)) < 0:
            if len(self._held) - self._at >= most:
                raise NotACall(f"{tag!r} is missing")
            self._raise_if_ended()
            yield
        return self._consume(place + len(tag))[: -len(tag)]

    def read_run(self, pattern: re.Pattern[str], most: int = MOST_HEADER) -> Reading[str]:
        """Read the longest run of characters of a class, which the pattern must match in any number, also none: it may
        arrive in pieces. Raises NotACall if there are more than `most`.
        """
        run = ""
        while True:
            run += self._consume(pattern.match(self._held, self._at).end())  # type: ignore[union-attr]
            if len(run) > most:
                raise NotACall(f"a name has more than {most} characters")
            if self._at < len(self._held):
                return run
            self._raise_if_ended()
            yield

    def read_value_up_to(self, tag: str, tell: Callable[[str], None] | None = None) -> Reading[str]:
        """Read a text of any length before a tag, which is consumed. With `tell`, its pieces are given to it as they
        come, and the text is not returned.
        """
        pieces: list[str] = []
        tell = tell or pieces.append
        search = _tag_pattern((tag,)).search
        while (found := search(self._held, self._at)) is None or not found[1]:
            end = len(self._held) if found is None else found.start()
            if end > self._at:
                tell(self._consume(end))
            self._raise_if_ended()
            yield
        tell(self._consume(found.end())[: -len(tag)])
        return "".join(pieces)

    def read_literal(self, quotes: tuple[str, ...], ends: str, escapes: bool = False) -> Reading[str]:
        """Read a literal up to one of the signs `ends` outside of its strings and brackets. The sign is not consumed.
        Strings are between two of the same `quotes`; with `escapes`, a quote after a backslash ends none.
        """
        pieces: list[str] = []
        depth, quote = 0, ""
        outside = _tag_pattern((*quotes, *"[](){},"))
        inside = {each: _tag_pattern((each, "\\") if escapes else (each,)) for each in quotes}
        while True:
            found = (inside[quote] if quote else outside).search(self._held, self._at)
            if found is None or not found[1]:
                pieces.append(self._consume(len(self._held) if found is None else found.start()))
                self._raise_if_ended()
                yield
                continue
            sign = found[1]
            if not quote and depth == 0 and sign in ends:
                pieces.append(self._consume(found.start()))
                return "".join(pieces)
            pieces.append(self._consume(found.end()))
            if sign == "\\":
                while self._at == len(self._held):
                    self._raise_if_ended()
                    yield
                pieces.append(self._consume(self._at + 1))
            elif sign in quotes:
                quote = "" if quote else sign
            else:
                depth += {"[": 1, "(": 1, "{": 1, ",": 0}.get(sign, -1)
                if depth < 0:
                    raise NotACall(f"{sign!r} closes nothing")

    def find_next_call(self, section: str, call: str, end: str) -> Reading[bool]:
        """Read up to the tag `call` of the next call between the tags `section` and `end`. Return False at the end of
        the answer. What looks like a call and is none does not hide those after it.
        """
        while True:
            if not self.in_section:
                if not (yield from self.read_text_up_to(section)):
                    return False
                yield from self.skip_blanks()
                yield from self.skip_text(call)
                self.in_section = True
                self._before_section = len(self.calls)
                return True
            tag = yield from self.read_text_up_to(call, end)
            if tag == call:
                return True
            if not tag:
                return False
            if self._before_section == len(self.calls):
                self.drop_call()  # a section without calls is text, with its tags
            self.end_calls()
            self.in_section = False

    def read_json(self) -> Reading[str]:
        """Read a JSON object, list or string up to its end, and return its text, which is not checked."""
        pieces: list[str] = []
        yield from self._read_json_pieces(pieces.append)
        return "".join(pieces)

    def read_json_string(self) -> Reading[str]:
        """Read a JSON string, and return its value. Raises NotACall if there is none."""
        if (yield from self.peek_char()) != '"':
            if self._at == len(self._held):
                self._raise_if_ended()
            raise NotACall("there is no JSON string")
        return str(parse_strict_json((yield from self.read_json())))

    # -- for parsers: calls -------------------------------------------------------------------------------------------

    def begin_calls(self) -> None:
        """Note that a call may begin here. If it turns out to be none, its characters become text."""
        self._since = []

    def begin_paragraph(self) -> None:
        """Separate the following text from the text before it by an empty line."""
        if self._said:
            self.text.append("\n\n")

    def begin_call(self, name: str, id: str = "") -> None:
        """Begin a call of the tool `name`, with the id that the model gave it, if any."""
        self._call = _OpenCall(len(self.calls), id or next(self._ids), name)
        if self._streamed:
            self.deltas.append(CallDelta(self._call.index, self._call.id, name))

    def add_arguments(self, piece: str) -> None:
        """Add a piece of JSON to the arguments of the call."""
        call = self._call
        assert call is not None
        if piece:
            call.pieces.append(piece)
            if self._streamed:
                self.deltas.append(CallDelta(call.index, arguments=piece))

    def read_json_arguments(self) -> Reading[None]:
        """Read the arguments of the call as a JSON object. Raises NotACall if there is none."""
        if (yield from self.peek_char()) != "{":
            if self._at == len(self._held):
                self._raise_if_ended()
            raise NotACall("the arguments are no JSON object")
        yield from self._read_json_pieces(self.add_arguments)

    def end_call(self) -> None:
        """Complete the call. Raises NotACall if its arguments are no JSON object."""
        call = self._call
        assert call is not None
        arguments = "".join(call.pieces)
        if not isinstance(parse_strict_json(arguments), dict):
            raise NotACall("the arguments are no JSON object")
        if not self._streamed:
            self.deltas += [CallDelta(call.index, call.id, call.name), CallDelta(call.index, arguments=arguments)]
        self.calls.append(ToolCall(call.id, call.name, arguments))
        self.said_after_calls = False
        self._call = None
        self._since = []

    def end_calls(self) -> None:
        """Note that the following text is no part of a call."""
        self._since = None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _add_text(self, text: str, consumed: bool = False) -> None:
        """Add a text to the answer's `text`, and consume it if it is the next unread one."""
        if text:
            self._said = True
            self.untouched = False
            self.said_after_calls = self.said_after_calls or not text.isspace()
            self.text.append(text)
        if consumed:
            self._at += len(text)

    def _consume(self, end: int) -> str:
        """Consume the characters before the place `end`, and return them."""
        self.untouched = False
        taken = self._held[self._at : end]
        self._at = end
        if self._since is not None:
            self._since.append(taken)
        return taken

    def _consume_rest(self) -> str:
        """Consume all that is left, and return it."""
        rest, self._held, self._at = self._held[self._at :], "", 0
        return rest

    def _raise_if_ended(self) -> None:
        """Raise TruncatedCall if no more text comes."""
        if self.ended:
            raise TruncatedCall

    def _read_json_pieces(self, tell: Callable[[str], None]) -> Reading[None]:
        """Read one JSON text, and give its pieces to `tell` as they come."""
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
                tell(self._consume(end))
            if not whole:
                self._raise_if_ended()
                yield


class _OpenCall:
    """A call that has begun and is not complete."""

    def __init__(self, index: int, id: str, name: str) -> None:
        self.index = index
        self.id = id
        self.name = name
        self.pieces: list[str] = []


def parse_strict_json(text: str) -> object:
    """Parse a JSON text. Raises NotACall, also for NaN, infinities, and keys that come twice: readers of JSON differ
    in which of them counts.
    """
    try:
        return load_json(text, parse_constant=_reject_constant, object_pairs_hook=_reject_duplicates)
    except (ValueError, RecursionError) as error:
        raise NotACall(str(error)) from None


def _reject_constant(name: str) -> None:
    """Raise ValueError for NaN or an infinity in JSON."""
    raise ValueError(f"{name} is no JSON")


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs. Raises ValueError if a key comes twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found


_NOT_BLANK = re.compile(r"\S")


@cache
def _tag_pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Return an expression that finds the first of some tags, as its group 1, or the beginning of one at the end."""
    ordered = sorted(tags, key=len, reverse=True)
    whole = "|".join(map(re.escape, ordered)) or "(?!)"
    return re.compile("|".join([f"({whole})", *(f"{_prefix_pattern(tag[:-1])}\\Z" for tag in ordered if len(tag) > 1)]))


def _prefix_pattern(text: str) -> str:
    """Return an expression that matches a text, or any beginning of it."""
    inner = f"(?:{_prefix_pattern(text[1:])})?" if len(text) > 1 else ""
    return f"{re.escape(text[0])}{inner}"


def strip_blanks(text: str) -> str:
    """Strip the blanks at the end of a text, at most `MOST_TAG_BLANKS` of them."""
    rest = text.rstrip()
    return rest if len(text) - len(rest) <= MOST_TAG_BLANKS else text[: len(text) - MOST_TAG_BLANKS]


def partial_tag_length(tag: str, text: str, start: int = 0) -> int:
    """Return how many characters at the end of `text`, after the place `start`, could begin `tag`."""
    place = text.find(tag[0], max(start, len(text) - len(tag) + 1))
    while place >= 0:
        if tag.startswith(text[place:]):
            return len(text) - place
        place = text.find(tag[0], place + 1)
    return 0
