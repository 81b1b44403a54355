"""AnswerReader: the text of an answer as it arrives, for the parsers of tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

from cortexmlx.structured.tools import CallDelta, ToolCall, parse_integer

T = TypeVar("T")

Reading = Generator[None, None, T]
"""A parser, or a part of one. It yields when it needs more text, and returns what it has read. One that yields after
the end of the answer was in the middle of a call.
"""

MAX_HEADER = 1024
"""How many characters the name of a tool or of an argument, with what is around it, may have. More are no call."""

MAX_TAG_BLANKS = 64
"""How many blanks around a tag belong to it at most. As many are held back until the next text is known."""


class NotACall(Exception):
    """Raised for text that began like a tool call and is none. It becomes text of the answer."""


class AnswerReader:
    """Reads the text of one answer as it arrives, and collects the text and the calls that a parser finds in it.

    The text that belongs to no call is in `text`, the pieces of calls are in `deltas`, and complete calls in `calls`.
    Whoever feeds the reader takes the first two away. With `streaming`, pieces of a call are told as they come:
    a grammar makes sure that what begins is a call. Otherwise it is told when it is complete.
    """

    def __init__(self, ids: Iterator[str], streaming: bool) -> None:
        self.text: list[str] = []
        self.deltas: list[CallDelta] = []
        self.calls: list[ToolCall] = []
        self.new_values: list[tuple[str, dict[str, Any]]] = []
        """The tool and the arguments of each complete call, for whoever checks them and takes them away."""
        self.is_ended = False
        self._ids = ids
        self.streaming = streaming
        # What was read of `_buffer` stays there until more text comes: to cut it off each time takes quadratic time.
        self._buffer = ""
        self._position = 0
        self._call: _OpenCall | None = None
        self._pending_pieces: list[str] | None = None
        self._has_text = False
        self.is_untouched = True
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
        return bool(self._pending_pieces and "".join(self._pending_pieces).strip())

    def add(self, text: str) -> None:
        """Append the next text of the answer."""
        self._buffer = self._buffer[self._position :] + text
        self._position = 0

    def drop_call(self, is_truncated: bool = False) -> None:
        """Give up the call being read: it becomes text, unless it was cut off (`is_truncated`) and streamed already."""
        if self._pending_pieces is not None and not (is_truncated and self.streaming):
            self._add_text("".join(self._pending_pieces) + (self._consume_rest() if is_truncated else ""))
        self._call = self._pending_pieces = None

    # -- for parsers: text --------------------------------------------------------------------------------------------

    def read_text_up_to(self, *tags: str) -> Reading[str]:
        """Read text up to the first of some tags. Return the tag, which is consumed; empty at the end of the answer.
        Blanks before a call's tag are dropped, and so is a part of a tag at the end of an answer with calls.
        """
        search = _tag_pattern(tags).search
        num_clear = 0  # how many unread characters begin no tag
        while True:
            match = search(self._buffer, self._position + num_clear)
            if match is not None and match[1]:
                self._add_text(strip_blanks(self._buffer[self._position : match.start()]), consume=True)
                self.begin_calls()
                self._consume(match.end())
                return match[1]
            if self.is_ended:
                rest = self._consume_rest()
                is_partial_tag = self.calls and any(tag.startswith(rest.strip()) for tag in ("", *tags))
                self._add_text("" if is_partial_tag else rest)
                return ""
            end = len(self._buffer) if match is None else match.start()
            if end > self._position + num_clear:
                self._add_text(strip_blanks(self._buffer[self._position : end]), consume=True)
                num_clear = end - self._position
            yield

    def peek_one_of(self, *beginnings: str) -> Reading[str]:
        """Return which of some texts comes next, the longest that fits, without consuming it; empty if none does."""
        max_length = max(map(len, beginnings))
        while True:
            next_text = self._buffer[self._position : self._position + max_length]
            candidates = [text for text in beginnings if text.startswith(next_text)]
            if self.is_ended or candidates in ([], [next_text]):
                return max(filter(next_text.startswith, beginnings), key=len, default="")
            yield

    def peek_char(self) -> Reading[str]:
        """Return the next character, without consuming it."""
        while self._position == len(self._buffer):
            yield
        return self._buffer[self._position]

    # -- for parsers: within a call -----------------------------------------------------------------------------------

    def skip_blanks(self) -> Reading[None]:
        """Skip blanks."""
        while True:
            end = _BLANKS.match(self._buffer, self._position).end()  # type: ignore[union-attr]
            if end > self._position:
                self._consume(end)
            if end < len(self._buffer) or self.is_ended:
                return
            yield

    def skip_text(self, text: str) -> Reading[None]:
        """Skip a text that must come next. Raises NotACall if another one comes."""
        while len(self._buffer) - self._position < len(text) and text.startswith(self._buffer[self._position :]):
            yield
        if not self._buffer.startswith(text, self._position):
            raise NotACall(f"{text!r} is missing")
        self._consume(self._position + len(text))

    def read_one_of(self, *texts: str) -> Reading[str]:
        """Read one of some texts, and return it. Raises NotACall if any other text comes."""
        while not (text := (yield from self.peek_one_of(*texts))):
            next_text = self._buffer[self._position : self._position + max(map(len, texts))]
            if not any(each.startswith(next_text) for each in texts):
                raise NotACall(f"none of {texts} follows")
            yield
        self._consume(self._position + len(text))
        return text

    def read_up_to(self, tag: str) -> Reading[str]:
        """Return the text before a tag, and consume both. Raises NotACall if the text is longer than `MAX_HEADER`."""
        max_length = MAX_HEADER + len(tag)
        num_searched = 0  # how many unread characters begin no tag
        while (index := self._buffer.find(tag, self._position + num_searched, self._position + max_length)) < 0:
            if len(self._buffer) - self._position >= max_length:
                raise NotACall(f"{tag!r} is missing")
            num_searched = max(0, len(self._buffer) - self._position - len(tag) + 1)
            yield
        return self._consume(index + len(tag))[: -len(tag)]

    def read_run(self, pattern: re.Pattern[str], max_length: int = MAX_HEADER) -> Reading[str]:
        """Read the longest run of characters of one class. `pattern` must match any number of them, even none, since
        they may arrive in pieces. Raises NotACall if there are more than `max_length`.
        """
        run = ""
        while True:
            run += self._consume(pattern.match(self._buffer, self._position).end())  # type: ignore[union-attr]
            if len(run) > max_length:
                raise NotACall(f"a name has more than {max_length} characters")
            if self._position < len(self._buffer):
                return run
            yield

    def read_value_up_to(self, tag: str, on_piece: Callable[[str], None] | None = None) -> Reading[str]:
        """Read text of any length, and the tag after it. Return the text, or pass each piece to `on_piece` instead."""
        pieces: list[str] = []
        on_piece = on_piece or pieces.append
        search = _tag_pattern((tag,)).search
        while (match := search(self._buffer, self._position)) is None or not match[1]:
            end = len(self._buffer) if match is None else match.start()
            if end > self._position:
                on_piece(self._consume(end))
            yield
        on_piece(self._consume(match.end())[: -len(tag)])
        return "".join(pieces)

    def read_literal(self, quotes: Mapping[str, bool], end_signs: str) -> Reading[str]:
        """Read a literal up to one of the signs `end_signs` outside of its strings and brackets. The sign is not
        consumed. A string begins and ends with the same sign of `quotes`; a backslash escapes signs that map to True.
        """
        pieces: list[str] = []
        depth, quote = 0, ""
        outside = _tag_pattern((*quotes, *"[](){},"))
        inside = {each: _tag_pattern((each, "\\") if escapes else (each,)) for each, escapes in quotes.items()}
        while True:
            match = (inside[quote] if quote else outside).search(self._buffer, self._position)
            if match is None or not match[1]:
                pieces.append(self._consume(len(self._buffer) if match is None else match.start()))
                yield
                continue
            sign = match[1]
            if not quote and depth == 0 and sign in end_signs:
                pieces.append(self._consume(match.start()))
                return "".join(pieces)
            pieces.append(self._consume(match.end()))
            if sign == "\\":
                yield from self.peek_char()
                pieces.append(self._consume(self._position + 1))
            elif sign in quotes:
                quote = "" if quote else sign
            else:
                depth += {"[": 1, "(": 1, "{": 1, ",": 0}.get(sign, -1)
                if depth < 0:
                    raise NotACall(f"{sign!r} closes nothing")

    def find_next_call(self, section: str, call: str, end: str) -> Reading[bool]:
        """Read up to the tag `call` of the next call between the tags `section` and `end`. Return False at the end of
        the answer. A section without a call becomes text, and the search goes on after it.
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
            raise NotACall("there is no JSON string")
        return str(parse_strict_json((yield from self.read_json())))

    # -- for parsers: calls -------------------------------------------------------------------------------------------

    def begin_calls(self) -> None:
        """Note that calls may begin here. If none does, the characters from here on become text."""
        self._pending_pieces = []

    def begin_paragraph(self) -> None:
        """Separate the following text from the text before it by an empty line."""
        if self._has_text:
            self.text.append("\n\n")

    def begin_call(self, name: str, id: str = "") -> None:
        """Begin a call of the tool `name`, with the id that the model gave it, if any."""
        self._call = _OpenCall(len(self.calls), id or next(self._ids), name)
        if self.streaming:
            self.deltas.append(CallDelta(self._call.index, self._call.id, name))

    def add_arguments(self, piece: str) -> None:
        """Add a piece of JSON to the arguments of the call."""
        call = self._call
        assert call is not None
        if piece:
            call.argument_pieces.append(piece)
            if self.streaming:
                self.deltas.append(CallDelta(call.index, "", "", piece))

    def read_json_arguments(self) -> Reading[None]:
        """Read the arguments of the call as a JSON object. Raises NotACall if there is none."""
        if (yield from self.peek_char()) != "{":
            raise NotACall("the arguments are no JSON object")
        yield from self._read_json_pieces(self.add_arguments)

    def end_call(self) -> None:
        """Complete the call. Raises NotACall if its arguments are no JSON object."""
        call = self._call
        assert call is not None
        arguments = "".join(call.argument_pieces)
        values = parse_strict_json(arguments, repeated_keys=self.streaming)  # what was told is no text any more
        if not isinstance(values, dict):
            raise NotACall("the arguments are no JSON object")
        if not self.streaming:
            self.deltas += [CallDelta(call.index, call.id, call.name), CallDelta(call.index, arguments=arguments)]
        self.calls.append(ToolCall(call.id, call.name, arguments))
        self.new_values.append((call.name, values))
        self.said_after_calls = False
        self._call = None
        self._pending_pieces = []

    def end_calls(self) -> None:
        """Note that the following text is no part of a call."""
        self._pending_pieces = None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _add_text(self, text: str, consume: bool = False) -> None:
        """Add a text to the answer's `text`. With `consume`, it is the next unread text, which is consumed."""
        if text:
            self._has_text = True
            self.is_untouched = False
            self.said_after_calls = self.said_after_calls or not text.isspace()
            self.text.append(text)
        if consume:
            self._position += len(text)

    def _consume(self, end: int) -> str:
        """Consume the characters before the place `end`, and return them."""
        self.is_untouched = False
        consumed_text = self._buffer[self._position : end]
        self._position = end
        if self._pending_pieces is not None:
            self._pending_pieces.append(consumed_text)
        return consumed_text

    def _consume_rest(self) -> str:
        """Consume all that is left, and return it."""
        rest, self._buffer, self._position = self._buffer[self._position :], "", 0
        return rest

    def _read_json_pieces(self, on_piece: Callable[[str], None]) -> Reading[None]:
        """Read one JSON value, and pass its pieces to `on_piece` as they arrive."""
        depth, in_string, is_escaped, is_complete = 0, False, False, False
        while not is_complete:
            end = self._position
            while end < len(self._buffer) and not is_complete:
                char = self._buffer[end]
                end += 1
                if is_escaped:
                    is_escaped = False
                elif in_string:
                    in_string, is_escaped = char != '"', char == "\\"
                elif char == '"':
                    in_string = True
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                is_complete = depth <= 0 and not in_string and not is_escaped
            if end > self._position:
                on_piece(self._consume(end))
            if not is_complete:
                yield


class _OpenCall:
    """A call that has begun and is not complete."""

    def __init__(self, index: int, id: str, name: str) -> None:
        self.index = index
        self.id = id
        self.name = name
        self.argument_pieces: list[str] = []


def parse_strict_json(text: str, *, repeated_keys: bool = False) -> object:
    """Parse JSON. Raises NotACall if it is invalid, for NaN and infinities, and for a key that comes twice, since
    readers disagree on which value counts. With `repeated_keys`, the last value counts.
    """
    try:
        return _STRICT_DECODERS[repeated_keys].decode(text)
    except (ValueError, RecursionError) as error:
        raise NotACall(str(error)) from None


def _reject_constant(name: str) -> None:
    """Raise ValueError for NaN or an infinity in JSON."""
    raise ValueError(f"{name} is no JSON")


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs. Raises ValueError if a key comes twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key comes twice")
    return result


_STRICT_DECODERS = [
    json.JSONDecoder(parse_int=parse_integer, parse_constant=_reject_constant, object_pairs_hook=make_object)
    for make_object in (_reject_duplicates, dict)
]

_BLANKS = re.compile(r"\s*")


@cache
def _tag_pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Return an expression that finds the first of some tags, as its group 1, or the beginning of one at the end."""
    sorted_tags = sorted(tags, key=len, reverse=True)
    any_tag = "|".join(map(re.escape, sorted_tags)) or "(?!)"
    return re.compile(
        "|".join([f"({any_tag})", *(f"{_prefix_pattern(tag[:-1])}\\Z" for tag in sorted_tags if len(tag) > 1)])
    )


def _prefix_pattern(text: str) -> str:
    """Return an expression that matches a text, or any beginning of it."""
    rest_pattern = f"(?:{_prefix_pattern(text[1:])})?" if len(text) > 1 else ""
    return f"{re.escape(text[0])}{rest_pattern}"


def strip_blanks(text: str) -> str:
    """Strip the blanks at the end of a text, at most `MAX_TAG_BLANKS` of them."""
    rest = text.rstrip()
    return rest if len(text) - len(rest) <= MAX_TAG_BLANKS else text[: len(text) - MAX_TAG_BLANKS]


def partial_tag_length(tag: str, text: str, start: int = 0) -> int:
    """Return how many characters at the end of `text`, after the place `start`, could begin `tag`."""
    index = text.find(tag[0], max(start, len(text) - len(tag) + 1))
    while index >= 0:
        if tag.startswith(text[index:]):
            return len(text) - index
        index = text.find(tag[0], index + 1)
    return 0
