"""Text that can be shown while tokens are still coming: without half characters or parts of a stop string, and with the
thoughts apart from the answer.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import NamedTuple, Protocol

from cortexmlx.structured.calls.format import CallParser, Calls
from cortexmlx.structured.calls.reader import WIDEST, beginning_of, without_blanks
from cortexmlx.structured.matcher import Mask, only
from cortexmlx.structured.output import Thoughts
from cortexmlx.structured.tools import CallDelta, ToolCall
from cortexmlx.types.sampling_params import SamplingParams


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


# Stop conditions: stop strings in a growing text, and stop token ids.


_CHARACTER_BITS = 21
"""Bits of a Unicode code point. A key of `StopTable` is made of a node and a character."""


class StopTable:
    """A table that finds any of several strings in one pass over a text (Aho and Corasick, 1975).

    Its nodes are the beginnings of the strings; node 0 is the empty one. Time and memory to build it are linear in the
    characters of the strings. It does not change afterwards, so any number of texts may use it at once.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._children: dict[int, int] = {}
        self._shorter = array("i", [0])
        self.depth = array("i", [0])
        """Characters of each node."""
        self.complete = array("i", [0])
        """Characters of the longest stop string that each node ends with; 0 if it ends with none."""
        edges = [edge for stop in stops for edge in self._add(stop)]
        for parent, code, node in sorted(edges, key=lambda edge: self.depth[edge[2]]):
            self._shorter[node] = self.advance(self._shorter[parent], code) if parent else 0
            self.complete[node] = self.complete[node] or self.complete[self._shorter[node]]

    def __len__(self) -> int:
        return len(self._children)

    def advance(self, node: int, code: int) -> int:
        """Return the node after one more character: the longest beginning of a stop string with which the text now
        ends.
        """
        while (child := self._children.get(node << _CHARACTER_BITS | code)) is None and node:
            node = self._shorter[node]
        return child or 0

    def _add(self, stop: str) -> Iterable[tuple[int, int, int]]:
        """Add the nodes of one string. Yield each new one: the node before it, the character, and the node."""
        node = 0
        for code in map(ord, stop):
            parent, key = node, node << _CHARACTER_BITS | code
            node = self._children.setdefault(key, len(self.depth))
            if node == len(self.depth):
                self.depth.append(self.depth[parent] + 1)
                self.complete.append(0)
                self._shorter.append(0)
                yield parent, code, node
        self.complete[node] = len(stop)


class StopStrings:
    """A text, piece by piece, up to the first stop string.

    The stop string that is *complete* first ends the text, as if characters came one at a time. So the result does not
    depend on how the text is cut. Of several that are complete at the same character, the longest counts. Characters
    that may belong to a stop string are held back. The time per character does not depend on the length of the text.
    """

    def __init__(self, table: StopTable) -> None:
        self._table = table
        self._node = 0
        self._held = ""
        self.stopped = False
        self.found = ""
        """The stop string that is complete; empty if none is."""

    def feed(self, new: str) -> str:
        """Return the text up to a complete stop string, or else up to the longest beginning of one. Text after a stop
        string is ignored.
        """
        if self.stopped:
            return ""
        if not self._table:
            return new
        text, node, advance, complete = self._held + new, self._node, self._table.advance, self._table.complete
        for end, char in enumerate(new, len(self._held) + 1):
            node = advance(node, ord(char))
            if complete[node]:
                self.stopped = True
                self._held = ""
                self.found = text[end - complete[node] : end]
                return text[: end - complete[node]]
        self._node = node
        safe = len(text) - self._table.depth[node]
        self._held = text[safe:]
        return text[:safe]

    def rest(self) -> str:
        """Return the text that was held back, because no more text comes."""
        rest, self._held = self._held, ""
        return rest


@dataclass(frozen=True)
class Stops:
    """What ends the answers of one request. It is made once, on the thread that submits the request."""

    everywhere: StopTable = field(default_factory=StopTable)
    """Stop strings that also end thoughts: those that contain one of their tags."""
    in_answer: StopTable = field(default_factory=StopTable)
    """Stop strings of the answer only."""
    token_ids: frozenset[int] = frozenset()
    """Tokens that end an answer."""
    thinking: ThinkingLimit | None = None
    """What ends its thoughts."""

    @classmethod
    def of(cls, params: SamplingParams, eos_ids: Collection[int] = (), thoughts: Thoughts | None = None) -> Stops:
        """Return what `params` ask for, with the tokens that end the model's answers."""
        tags = () if thoughts is None else (thoughts.open, thoughts.close)
        tagged = [s for s in params.stop if any(tag in s for tag in tags)]
        others = [s for s in params.stop if s not in tagged]
        token_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_ids)
        return cls(StopTable(tagged), StopTable(others), token_ids)


# Split a model's thoughts from its answer while the text streams.


class Kind(Enum):
    """What a part of a text is."""

    MARKUP = "markup"
    THOUGHT = "thought"
    ANSWER = "answer"


@dataclass(frozen=True)
class TextPart:
    """A piece of text of one kind."""

    text: str
    kind: Kind


class _Place(Enum):
    """Where in an answer the next text is."""

    BEFORE = "nothing has come, or only blanks"
    OPENED = "right after the tag that opens thoughts"
    INSIDE = "in the thoughts"
    CLOSED = "right after the tag that closes them"
    ANSWER = "in the answer"


class ThoughtSplitter:
    """Cuts a stream of text into thoughts, the answer after them, and the tags and blanks between the two.

    Thoughts come first. The prompt opens them (`begun`), or the text does, with only blanks before the tag. Once the
    answer has begun, a tag is a part of it, for example in code. The parts together are the text, and do not depend on
    how it was cut. The time per character does not depend on the length of the text.
    """

    def __init__(self, thoughts: Thoughts) -> None:
        self._thoughts = thoughts
        self._place = _Place.OPENED if thoughts.begun else _Place.BEFORE
        self._again = thoughts.begun
        self._held = ""

    @property
    def over(self) -> bool:
        """Whether all further text belongs to the answer."""
        return self._place is _Place.ANSWER and not self._held

    @property
    def inside(self) -> bool:
        """Whether the next text belongs to the thoughts."""
        return self._place in (_Place.OPENED, _Place.INSIDE)

    @property
    def half_closed(self) -> int:
        """How many characters at the end of the text begin the tag that closes thoughts."""
        return beginning_of(self._thoughts.close, self._held) if self._place is _Place.INSIDE else 0

    def feed(self, text: str) -> Iterator[TextPart]:
        """Take text, and yield the parts that are certain now."""
        self._held += text
        return self._parts(final=False)

    def rest(self) -> Iterator[TextPart]:
        """Yield what was held back because it could have become a tag: no more text comes."""
        return self._parts(final=True)

    def _parts(self, final: bool) -> Iterator[TextPart]:
        while self._held:
            place = self._place
            part = self._next(final)
            if part is not None and part.text:
                self._held = self._held[len(part.text) :]
                yield part
            elif place is self._place:
                return

    def _next(self, final: bool) -> TextPart | None:
        """Return the part with which the held text begins, if it is certain, and advance the place."""
        if self._place is _Place.BEFORE:
            return self._before(final)
        if self._place is _Place.OPENED:
            return self._opened(final)
        if self._place is _Place.INSIDE:
            return self._inside(final)
        if self._place is _Place.CLOSED:
            return self._blanks(_Place.ANSWER)
        return TextPart(self._held, Kind.ANSWER)

    def _before(self, final: bool) -> TextPart | None:
        body = self._held.lstrip()
        blanks = len(self._held) - len(body)
        tags = {self._thoughts.open: _Place.OPENED, self._thoughts.skipped: _Place.CLOSED}
        for tag, place in tags.items() if blanks <= WIDEST else ():
            if tag and body.startswith(tag):
                self._place = place
                return TextPart(self._held[: blanks + len(tag)], Kind.MARKUP)
        if not final and blanks <= WIDEST and any(tag.startswith(body) for tag in tags if tag):
            return None
        self._place = _Place.ANSWER
        return None

    def _opened(self, final: bool) -> TextPart | None:
        """Return the part after the opening tag. Some models repeat the tag that their prompt has opened."""
        if self._held[0].isspace():
            return self._blanks(_Place.OPENED)
        tag = self._thoughts.open
        if self._again and not final and tag.startswith(self._held) and self._held != tag:
            return None
        again, self._again = self._again and self._held.startswith(tag), False
        if again:
            return TextPart(tag, Kind.MARKUP)
        self._place = _Place.INSIDE
        return None

    def _inside(self, final: bool) -> TextPart | None:
        before, tag, _ = self._held.partition(self._thoughts.close)
        if tag:
            thought = without_blanks(before)
            if thought:
                return TextPart(thought, Kind.THOUGHT)
            self._place = _Place.CLOSED
            return TextPart(before + tag, Kind.MARKUP)
        if final:
            return TextPart(self._held, Kind.THOUGHT)
        certain = self._held[: len(self._held) - beginning_of(self._thoughts.close, self._held)]
        return TextPart(without_blanks(certain), Kind.THOUGHT)

    def _blanks(self, then: _Place) -> TextPart | None:
        blanks = len(self._held) - len(self._held.lstrip())
        if blanks:
            return TextPart(self._held[:blanks], Kind.MARKUP)
        self._place = then
        return None


class ThoughtTokens:
    """Counts the tokens that wrote an answer's thoughts: those whose text is at least partly in the thoughts. A token
    without text yet, such as half a character, counts at the place of the next text. Tags and the blanks around them
    are no thoughts.
    """

    def __init__(self) -> None:
        self._ends = [0]
        self._thought = (0, 0)
        self._parted = 0

    def add_token(self, new: str) -> None:
        """Note that the next token has added the text `new`."""
        self._ends.append(self._ends[-1] + len(new))

    def add_parts(self, parts: Iterable[TextPart]) -> None:
        """Add the next parts of the text."""
        for part in parts:
            begin, self._parted = self._parted, self._parted + len(part.text)
            if part.kind is Kind.THOUGHT:
                self._thought = self._thought[0] if self._thought[1] else begin, self._parted

    @property
    def count(self) -> int:
        """How many tokens wrote the thoughts."""
        first, last = self._thought
        return sum(begin < last and first < max(end, begin + 1) for begin, end in pairwise(self._ends))


# A limit of thoughts: after so many tokens, the model is made to write the tag that closes them.


_MOST_SILENT = 3
"""How many tokens without text may come before the tag is forced. They are parts of a character, which has four bytes
at most.
"""

Encode = Callable[[str, bool], Sequence[int]]
"""Returns the tokens of a text, without those that a tokenizer adds if the flag is False."""


@dataclass(frozen=True)
class ThinkingLimit:
    """What limits the thoughts of one request. It is made on the thread that submits the request."""

    tokens: int
    """How many tokens the thoughts may have."""
    close: str
    """The tag that closes them."""
    close_tokens: tuple[int, ...]
    first: int
    """How many characters of the tag its first token has. If other tokens wrote fewer, the whole tag is forced: to a
    model, and to a grammar, a special token whose name is written out is no tag.
    """
    encode: Encode
    vocab_size: int

    @classmethod
    def of(cls, tokens: int | None, thoughts: Thoughts | None, encode: Encode, vocab_size: int) -> ThinkingLimit | None:
        """Return the limit of a request; None if there is none, or if the thoughts are not told apart."""
        if tokens is None or thoughts is None:
            return None
        close = thoughts.close
        written = tuple(encode(close, False))
        sizes = range(1, len(close))
        first = next((n for n in sizes if tuple(encode(close[:n], False)) == written[:1]), len(close))
        return cls(tokens, close, written, first, encode, vocab_size)


class Thinking(Protocol):
    """Where an answer is, while it grows: see `TextStream`."""

    @property
    def in_thoughts(self) -> bool:
        """Whether the next text belongs to the thoughts."""

    @property
    def thoughts_over(self) -> bool:
        """Whether the next text belongs to the answer."""

    @property
    def half_closed(self) -> int:
        """How many characters of the closing tag are written."""

    @property
    def silent(self) -> bool:
        """Whether the newest token added no text, for example as a part of a character."""


class ThinkingBudget:
    """The thoughts of one answer, and how many tokens are left for them.

    A token counts if the answer is in its thoughts before and after it. Tags do not count.
    """

    def __init__(self, limit: ThinkingLimit, text: Thinking) -> None:
        self._limit = limit
        self._text = text
        self._left = limit.tokens
        self._inside = text.in_thoughts
        self._forced: list[int] = []
        self._silent = 0
        self._over = False

    @property
    def due(self) -> bool:
        """Whether a token may have to be forced after the next one, which is not known yet."""
        return not self._over and (bool(self._forced) or self._left <= 1)

    @property
    def most_drafts(self) -> int:
        """How many next tokens may be drafted, so that the token after them need not be forced whatever they are."""
        return sys.maxsize if self._over else max(0, self._left - 1)

    def take(self, token: int) -> None:
        """Follow the answer's next token, after its text was taken."""
        if self._over:
            return
        inside, before = self._text.in_thoughts, self._inside
        self._inside = inside
        self._silent = self._silent + 1 if self._text.silent else 0
        if self._forced:
            del self._forced[0]
            self._over = not self._forced
        elif before and inside:
            self._left -= 1
        elif before or self._text.thoughts_over:
            self._over = True

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next: those of the closing tag that are not written. Often there are
        none.
        """
        if not self._over and not self._forced and self._spent:
            written = self._text.half_closed
            begun = written >= self._limit.first
            rest = self._limit.encode(self._limit.close[written:], False) if begun else self._limit.close_tokens
            self._forced = list(rest)
        return self._forced

    def masks(self) -> list[Mask]:
        """Return a mask for each of the `forced` tokens."""
        return [only(token, self._limit.vocab_size) for token in self.forced()]

    @property
    def _spent(self) -> bool:
        return self._inside and self._left <= 0 and not 0 < self._silent <= _MOST_SILENT
