"""AnswerReader: the text of an answer as it arrives, for parsers that read it in order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from cortexmlx.tools.call import CallDelta, ToolCall, loaded

T = TypeVar("T")

Reading = Generator[None, None, T]
"""A parser, or a part of one. It yields when it needs more text, and returns what it has read."""

MOST_HEADER = 4096
"""How many characters the name of a tool, or what is around it, may have. More are no call."""

WIDEST = 64
"""How many blanks before a call are dropped at most."""


def _nothing(_: str) -> None:
    """Tell nobody."""


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
        self._held = ""
        self._call: _OpenCall | None = None
        self._since: list[str] | None = None
        self._said = False
        self.untouched = True
        """Whether nothing was said or taken yet."""

    # -- from outside -------------------------------------------------------------------------------------------------

    def add(self, text: str) -> None:
        """Append the next text of the answer."""
        self._held += text

    def drop_call(self, keep_text: bool) -> None:
        """Leave the call that is being read. Its characters become text, unless it was cut."""
        if keep_text and self._since is not None:
            self.text += self._since
        self._call = self._since = None

    # -- for parsers: text --------------------------------------------------------------------------------------------

    def text_up_to(self, *tags: str) -> Reading[str]:
        """Read text up to the first of some tags. Return the tag, which is consumed; empty at the end of the answer.
        Blanks before a tag are dropped, and the beginning of a tag with which an answer with calls is cut.
        """
        while True:
            found = min(((self._held.find(tag), tag) for tag in tags if tag in self._held), default=None)
            if found is not None:
                place, tag = found
                self._say(_without_blanks(self._held[:place]))
                self.begin_calls()
                self._take(place + len(tag), place)
                return tag
            if self.ended:
                cut = self.calls and any(tag.startswith(self._held.strip()) for tag in ("", *tags))
                self._say("" if cut else self._held)
                self._held = ""
                return ""
            keep = max((_beginning_of(tag, self._held) for tag in tags), default=0)
            certain = _without_blanks(self._held[: len(self._held) - keep])
            self._say(certain)
            self._held = self._held[len(certain) :]
            yield

    def begins_with(self, *beginnings: str) -> Reading[str]:
        """Return the first of some texts with which the unread text begins, which is not consumed; empty if there is
        none. Of several that fit, the longest counts.
        """
        while True:
            fits = [text for text in beginnings if self._held.startswith(text)]
            open_ = [text for text in beginnings if text.startswith(self._held) and text not in fits]
            if self.ended or not open_:
                return max(fits, key=len, default="")
            yield

    def next_char(self) -> Reading[str]:
        """Return the next character, which is not consumed; empty at the end of the answer."""
        while not self._held and not self.ended:
            yield
        return self._held[:1]

    # -- for parsers: within a call -----------------------------------------------------------------------------------

    def blanks(self) -> Reading[None]:
        """Skip blanks."""
        while (yield from self.next_char()).isspace():
            self._take(len(self._held) - len(self._held.lstrip()))

    def exactly(self, text: str) -> Reading[None]:
        """Skip a text. Raises NotACall if another one comes."""
        while len(self._held) < len(text) and text.startswith(self._held):
            yield from self._more()
        if not self._held.startswith(text):
            raise NotACall(f"{text!r} is missing")
        self._take(len(text))

    def one_of(self, *texts: str) -> Reading[str]:
        """Skip one of some texts, and return it. Raises NotACall if another one comes."""
        text = yield from self.begins_with(*texts)
        if not text:
            if any(each.startswith(self._held) for each in texts):
                self._check_end()
            raise NotACall(f"none of {texts} follows")
        self._take(len(text))
        return text

    def up_to(self, tag: str, most: int = MOST_HEADER) -> Reading[str]:
        """Return the text before a tag, which is consumed. Raises NotACall if it is longer than `most`."""
        while (place := self._held.find(tag)) < 0:
            if len(self._held) > most:
                raise NotACall(f"{tag!r} is missing")
            yield from self._more()
        return self._take(place + len(tag))[:place]

    def pieces_up_to(self, tag: str, written: Callable[[str], str]) -> Reading[None]:
        """Add the text before a tag to the arguments, `written` as JSON, piece by piece. The tag is consumed."""
        while (place := self._held.find(tag)) < 0:
            certain = len(self._held) - _beginning_of(tag, self._held)
            self.add_arguments(written(self._take(certain)))
            yield from self._more()
        self.add_arguments(written(self._take(place + len(tag))[:place]))

    def json_text(self) -> Reading[str]:
        """Return the JSON text that follows: an object, a list or a string. Raises NotACall if it is none of them."""
        pieces: list[str] = []
        yield from self._json(pieces)
        return "".join(pieces)

    def json_string(self) -> Reading[str]:
        """Return the JSON string that follows. Raises NotACall if there is none."""
        if (yield from self.next_char()) != '"':
            if not self._held:
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
        self._tell(CallDelta(self._call.index, self._call.id, name))

    def add_arguments(self, piece: str) -> None:
        """Add a piece of the arguments of the call."""
        assert self._call is not None
        if piece:
            self._call.pieces.append(piece)
            self._tell(CallDelta(self._call.index, arguments=piece))

    def json_arguments(self) -> Reading[None]:
        """Read the arguments of the call as a JSON object. Raises NotACall if there is none."""
        if (yield from self.next_char()) != "{":
            if not self._held:
                self._check_end()
            raise NotACall("the arguments are no JSON object")
        assert self._call is not None
        yield from self._json(self._call.pieces, self._tell_arguments)

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
        self._call = None
        self._since = []

    def end_calls(self) -> None:
        """Note that what follows is no part of a call."""
        self._since = None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if text:
            self._said = True
            self.untouched = False
            self.text.append(text)

    def _take(self, count: int, said: int = 0) -> str:
        """Consume characters, of which the first `said` were told as text."""
        self.untouched = False
        taken, self._held = self._held[:count], self._held[count:]
        if self._since is not None:
            self._since.append(taken[said:])
        return taken

    def _more(self) -> Reading[None]:
        """Wait for more text. Raises CutCall if there is no more."""
        self._check_end()
        yield

    def _check_end(self) -> None:
        if self.ended:
            raise CutCall

    def _tell(self, delta: CallDelta) -> None:
        if self._streamed:
            self.deltas.append(delta)

    def _tell_arguments(self, piece: str) -> None:
        assert self._call is not None
        self._tell(CallDelta(self._call.index, arguments=piece))

    def _json(self, pieces: list[str], tell: Callable[[str], None] = _nothing) -> Reading[None]:
        """Read one JSON text into `pieces`, and tell each of them."""
        depth, quoted, escaped = 0, False, False
        while True:
            count = 0
            for count, char in enumerate(self._held, 1):  # noqa: B007 (it is used after the loop)
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
                if depth <= 0 and not quoted and not escaped:
                    break
            else:
                if count:
                    pieces.append(self._take(count))
                    tell(pieces[-1])
                yield from self._more()
                continue
            pieces.append(self._take(count))
            tell(pieces[-1])
            return


class _OpenCall:
    """A call that is being read."""

    def __init__(self, index: int, id: str, name: str) -> None:
        self.index = index
        self.id = id
        self.name = name
        self.pieces: list[str] = []


def json_value(text: str) -> object:
    """Return the value of a JSON text. Raises NotACall, also for NaN and infinities."""
    try:
        return loaded(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise NotACall(str(error)) from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _without_blanks(text: str) -> str:
    """Return a text without the blanks at its end, of which at most `WIDEST` are removed."""
    return text[: max(len(text.rstrip()), len(text) - WIDEST)]


def _beginning_of(tag: str, text: str) -> int:
    """Return how many characters at the end of `text` could begin `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
