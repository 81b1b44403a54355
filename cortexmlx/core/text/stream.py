"""Text that can be shown while tokens are still coming: without half characters or parts of a stop string, and with the
thoughts apart from the answer.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from cortexmlx.core.text.stops import Stops, StopStrings
from cortexmlx.core.text.thoughts import Kind, ThoughtSplitter, ThoughtTokens
from cortexmlx.structured.calls.format import CallParser, Calls
from cortexmlx.structured.calls.reader import without_blanks
from cortexmlx.structured.output import Thoughts
from cortexmlx.structured.tools import CallDelta, ToolCall


class Detokenizer(Protocol):
    """A streaming detokenizer, mlx-lm's or ours. It holds back half characters."""

    def add_token(self, token: int) -> None:
        """Take one token id."""

    def finalize(self) -> None:
        """Turn what was held back into text, because no more tokens come."""

    @property
    def last_segment(self) -> str:
        """The text that was added since this was last read."""


class TextDelta(NamedTuple):
    """What a token adds to an answer, and to the thoughts before it."""

    text: str = ""
    thinking: str = ""
    calls: tuple[CallDelta, ...] = ()


class TextStream:
    """The text of one answer, piece by piece, up to the first stop string: see `StopStrings`.

    With `thoughts`, the model's thoughts are told apart: see `ThoughtSplitter`. Stop strings apply to the answer. They
    do not end thoughts, except those that contain one of the tags: see `Stops`. With a parser of `calls`, calls are
    told apart, too, and stop strings do not end them. `in_thoughts` takes calls with which an answer ends before its
    thoughts do.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Stops,
        thoughts: Thoughts | None = None,
        calls: CallParser | None = None,
        in_thoughts: CallsInThoughts | None = None,
    ) -> None:
        self.stopped = False
        """Whether a stop string is complete. Tokens that are pushed after that are ignored."""
        self.silent = False
        """Whether the newest token added no text, for example as a part of a character."""
        self._detokenizer = detokenizer
        self._everywhere = StopStrings(stops.everywhere) if stops.everywhere else None
        self._in_answer = StopStrings(stops.in_answer) if stops.in_answer else None
        self._splitter = None if thoughts is None else ThoughtSplitter(thoughts)
        self._thought_tokens = ThoughtTokens()
        self._calls = calls
        self._calls_in_thoughts = in_thoughts
        self._text = _Text()
        self._thinking = _Text()
        self._before = _Text()
        self._with_calls = _Text()

    @property
    def text(self) -> str:
        """The answer, as far as `push` and `finish` have returned it."""
        return self._text.joined()

    @property
    def thinking(self) -> str:
        """The thoughts, as far as `push` and `finish` have returned them."""
        return self._thinking.joined()

    @property
    def thinking_tokens(self) -> int:
        """How many tokens wrote the thoughts: see `ThoughtTokens`."""
        return self._thought_tokens.count

    @property
    def in_thoughts(self) -> bool:
        """Whether the next text belongs to the thoughts."""
        return self._splitter is not None and self._splitter.inside

    @property
    def thoughts_over(self) -> bool:
        """Whether the next text belongs to the answer."""
        return self._splitter is None or self._splitter.over

    @property
    def half_closed(self) -> int:
        """How many characters of the tag that closes thoughts are written."""
        return 0 if self._splitter is None else self._splitter.half_closed

    @property
    def raw_text(self) -> str:
        """Thoughts and answer, with the tags and blanks between them."""
        return self._before.joined() + (self.text if self._calls is None else self._with_calls.joined())

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None if none did."""
        found = (strings.found for strings in (self._everywhere, self._in_answer) if strings is not None)
        return next(filter(None, found), None)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The complete calls."""
        if self._calls_in_thoughts is not None and self._calls_in_thoughts.calls:
            return self._calls_in_thoughts.calls
        return () if self._calls is None else self._calls.calls

    @property
    def notes(self) -> list[str]:
        """What is wrong with calls."""
        own = [] if self._calls is None else self._calls.notes
        return own if self._calls_in_thoughts is None else [*own, *self._calls_in_thoughts.notes]

    def push(self, token: int) -> TextDelta:
        """Take one token id. Return the text that can now be shown, often none."""
        if self.stopped:
            return TextDelta()
        self._detokenizer.add_token(token)
        new = self._detokenizer.last_segment
        self.silent = not new
        if self._splitter is not None and not self._splitter.over:
            self._thought_tokens.add_token(new)
        if self._calls_in_thoughts is not None:
            self._calls_in_thoughts.see(token)
        return self._take(new)

    def finish(self, ended: bool = False) -> TextDelta:
        """Return the rest of the text, which was held back until now, because no more tokens come. `ended` says whether
        the model has ended its turn.
        """
        if self._in_answer is not None and self._in_answer.stopped:
            return TextDelta()
        new = ""
        if not self.stopped:
            self._detokenizer.finalize()
            new = self._detokenizer.last_segment
        text, thinking, calls = self._take(new, final=True)
        if self._calls_in_thoughts is not None and self.in_thoughts:
            rest, more = self._calls_in_thoughts.finish(ended, self.thinking)
            self._thinking.add(rest)
            thinking, calls = thinking + rest, calls + more
        return TextDelta(text, thinking, calls)

    def _take(self, new: str, final: bool = False) -> TextDelta:
        if self._everywhere is not None:
            new = self._up_to_stop(self._everywhere, new, final)
        thinking = ""
        if self._splitter is not None and not self._splitter.over:
            new, thinking = self._parted(self._splitter, new, final)
        calls: tuple[CallDelta, ...] = ()
        if self._calls is not None:
            self._with_calls.add(new)
            new, calls = self._called(self._calls, new, final)
        if self._in_answer is not None:
            new = self._up_to_stop(self._in_answer, new, final)
        self._text.add(new)
        return TextDelta(new, thinking, calls)

    @staticmethod
    def _called(parser: CallParser, new: str, final: bool) -> tuple[str, tuple[CallDelta, ...]]:
        """Return the text and the pieces of calls in a new text."""
        text, calls = parser.feed(new)
        if final:
            rest, more = parser.rest()
            text, calls = text + rest, calls + more
        return text, calls

    def _up_to_stop(self, strings: StopStrings, new: str, final: bool) -> str:
        """Return the part of a text before the first stop string."""
        text = strings.feed(new)
        if final:
            text += strings.rest()
        self.stopped = self.stopped or strings.stopped
        return text

    def _parted(self, splitter: ThoughtSplitter, new: str, final: bool) -> tuple[str, str]:
        """Return what the answer and the thoughts get of a new text."""
        parts = [*splitter.feed(new), *(splitter.rest() if final else ())]
        self._thought_tokens.add_parts(parts)
        self._before.add("".join(part.text for part in parts if part.kind is not Kind.ANSWER))
        thinking = "".join(part.text for part in parts if part.kind is Kind.THOUGHT)
        if self._calls_in_thoughts is not None:
            thinking = self._calls_in_thoughts.feed(thinking, closed=not splitter.inside)
        self._thinking.add(thinking)
        return "".join(part.text for part in parts if part.kind is Kind.ANSWER), thinking


class CallsInThoughts:
    """Calls with which an answer ends before its thoughts do: some models forget to close them.

    Such a call counts if it begins with the token that opens calls, is complete, fits its schema, and is the last that
    the model writes. All others are thoughts: a model that only thinks about a tool runs none. A call is held back
    until that is known.
    """

    def __init__(self, calls: Calls, key: str) -> None:
        self.calls: tuple[ToolCall, ...] = ()
        """The calls that count, when the answer has ended."""
        self.notes: list[str] = []
        self._key = key
        self._offered = calls
        self._opens = False
        self._parser: CallParser | None = None
        self._held: list[str] = []
        self._deltas: tuple[CallDelta, ...] = ()

    def see(self, token: int) -> None:
        """Note the token that wrote the next text."""
        self._opens = token == self._offered.format.opener

    def feed(self, thought: str, closed: bool) -> str:
        """Take the next text of the thoughts, which is the last if they are `closed`. Return what is certainly a
        thought.
        """
        certain = ""
        if self._parser is None:
            place = thought.rfind(self._offered.format.trigger) if self._opens else -1
            if place < 0:
                return thought
            certain = without_blanks(thought[:place])
            thought = thought[len(certain) :]
            self._parser, self._held, self._deltas = self._offered.parser(self._key, streamed=False), [], ()
            assert self._parser is not None
        self._held.append(thought)
        text, deltas = self._parser.feed(thought)
        self._deltas += deltas
        return certain + self._released() if closed or text.strip() else certain

    def finish(self, ended: bool, thinking: str) -> tuple[str, tuple[CallDelta, ...]]:
        """Return what was held back, or the calls: no more text comes. `thinking` is what came before."""
        if ended and self._parser is not None:
            _, deltas = self._parser.rest()
            if self._parser.ends_with_calls and not self._parser.notes:
                self.calls = self._parser.calls
                return "", self._deltas + deltas
        rest = self._released()
        if self._offered.format.trigger and self._offered.format.trigger in thinking + rest:
            self.notes.append(
                "the answer ended within its thoughts, so what looks like a call there was not taken as one"
            )
        return rest, ()

    def _released(self) -> str:
        held, self._parser, self._held = "".join(self._held), None, []
        return held


class _Text:
    """A text that grows."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)

    def joined(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""
