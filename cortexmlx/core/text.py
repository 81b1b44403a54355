"""The text of an answer while tokens are still coming: without half characters or parts of a stop string, and with the
thoughts and tool calls split off.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import NamedTuple, Protocol

from cortexmlx.models.tokenizers.detokenize import TextBuffer
from cortexmlx.structured.calls.format import AllowedCalls, CallParser
from cortexmlx.structured.calls.reader import MAX_TAG_BLANKS, partial_tag_length, strip_blanks
from cortexmlx.structured.matcher import Mask, single_token_mask
from cortexmlx.structured.output import Thoughts
from cortexmlx.structured.tools import CallDelta, ToolCall
from cortexmlx.types.sampling_params import SamplingParams


class IncrementalDetokenizer(Protocol):
    """A detokenizer that takes one token at a time, mlx-lm's or ours. It holds back half characters."""

    def add_token(self, token: int) -> None:
        """Take the next token."""

    def finalize(self) -> None:
        """Turn what is held back into text, because no more tokens come."""

    @property
    def last_segment(self) -> str:
        """The text that was added since this property was last read."""


class TextDelta(NamedTuple):
    """What one token adds to an answer's text, thoughts and tool calls."""

    text: str = ""
    thinking: str = ""
    calls: tuple[CallDelta, ...] = ()


class TextStream:
    """Turns the tokens of one answer into text, piece by piece, up to the first stop string. It splits off thoughts
    and tool calls.

    With `thoughts`, the model's thoughts are told apart: see `ThoughtSplitter`. Stop strings apply to the answer. They
    do not end thoughts, except those that contain one of the tags: see `StopConditions`. With a parser of `calls`,
    calls are told apart, too, and stop strings do not end them. `calls_in_thoughts` reads calls that end an answer
    whose thoughts were never closed.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        stops: StopConditions,
        thoughts: Thoughts | None = None,
        calls: CallParser | None = None,
        calls_in_thoughts: ThoughtCallReader | None = None,
    ) -> None:
        self.stopped = False
        """Whether a stop string is complete. Tokens that are pushed after that are ignored."""
        self.silent = False
        """Whether the newest token added no text, for example as a part of a character."""
        self._detokenizer = detokenizer
        self._everywhere = StopStringFilter(stops.everywhere) if stops.everywhere else None
        self._in_answer = StopStringFilter(stops.in_answer) if stops.in_answer else None
        self._splitter = None if thoughts is None else ThoughtSplitter(thoughts)
        self._thought_tokens = ThinkingTokenCounter()
        self._calls = calls
        self._calls_in_thoughts = calls_in_thoughts
        self._text = TextBuffer()
        self._thinking = TextBuffer()
        self._text_before_answer = TextBuffer()
        self._with_calls = TextBuffer()

    @property
    def text(self) -> str:
        """The answer's text so far, as returned by `push` and `finish`."""
        return self._text.getvalue()

    @property
    def thinking(self) -> str:
        """The thoughts so far, as returned by `push` and `finish`."""
        return self._thinking.getvalue()

    @property
    def thinking_tokens(self) -> int:
        """How many tokens wrote the thoughts: see `ThinkingTokenCounter`."""
        return self._thought_tokens.count

    @property
    def in_thoughts(self) -> bool:
        """Whether the next text belongs to the thoughts."""
        return self._splitter is not None and self._splitter.is_inside

    @property
    def thoughts_over(self) -> bool:
        """Whether the thoughts have ended, so that all further text belongs to the answer."""
        return self._splitter is None or self._splitter.is_over

    @property
    def closing_tag_chars(self) -> int:
        """How many characters of the tag that closes the thoughts are written so far."""
        return 0 if self._splitter is None else self._splitter.closing_tag_chars

    @property
    def raw_text(self) -> str:
        """Thoughts, answer and tool calls as the model wrote them, with the tags and blanks between them."""
        return self._text_before_answer.getvalue() + (self.text if self._calls is None else self._with_calls.getvalue())

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None if none did."""
        matched_strings = (
            strings.matched_string for strings in (self._everywhere, self._in_answer) if strings is not None
        )
        return next(filter(None, matched_strings), None)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The complete tool calls so far."""
        if self._calls_in_thoughts is not None and self._calls_in_thoughts.calls:
            return self._calls_in_thoughts.calls
        return () if self._calls is None else self._calls.calls

    @property
    def notes(self) -> list[str]:
        """Notes on what is wrong with tool calls."""
        call_notes = [] if self._calls is None else self._calls.notes
        return call_notes if self._calls_in_thoughts is None else [*call_notes, *self._calls_in_thoughts.notes]

    def push(self, token: int) -> TextDelta:
        """Take the next token. Return the text that can be shown now, often none."""
        if self.stopped:
            return TextDelta()
        self._detokenizer.add_token(token)
        new = self._detokenizer.last_segment
        self.silent = not new
        if self._splitter is not None and not self._splitter.is_over:
            self._thought_tokens.add_token(new)
        if self._calls_in_thoughts is not None:
            self._calls_in_thoughts.note_token(token)
        return self._split(new)

    def finish(self, turn_ended: bool = False) -> TextDelta:
        """Return the held-back rest of the text: no more tokens come. `turn_ended`: the model has ended its turn."""
        if self._in_answer is not None and self._in_answer.stopped:
            return TextDelta()
        new = ""
        if not self.stopped:
            self._detokenizer.finalize()
            new = self._detokenizer.last_segment
        text, thinking, calls = self._split(new, final=True)
        if self._calls_in_thoughts is not None and self.in_thoughts:
            rest, rest_calls = self._calls_in_thoughts.finish(turn_ended, self.thinking)
            self._thinking.add(rest)
            thinking, calls = thinking + rest, calls + rest_calls
        return TextDelta(text, thinking, calls)

    def _split(self, new: str, final: bool = False) -> TextDelta:
        """Split a new piece of text into the answer, the thoughts and tool calls, and cut it at a stop string."""
        if self._everywhere is not None:
            new = self._cut_at_stop(self._everywhere, new, final)
        thinking = ""
        if self._splitter is not None and not self._splitter.is_over:
            new, thinking = self._split_thoughts(self._splitter, new, final)
        calls: tuple[CallDelta, ...] = ()
        if self._calls is not None:
            self._with_calls.add(new)
            new, calls = self._calls.feed(new)
            if final:
                rest, rest_calls = self._calls.finish()
                new, calls = new + rest, calls + rest_calls
        if self._in_answer is not None:
            new = self._cut_at_stop(self._in_answer, new, final)
        self._text.add(new)
        return TextDelta(new, thinking, calls)

    def _cut_at_stop(self, strings: StopStringFilter, new: str, final: bool) -> str:
        """Return the part of a new piece of text before the first stop string."""
        text = strings.feed(new)
        if final:
            text += strings.rest()
        self.stopped = self.stopped or strings.stopped
        return text

    def _split_thoughts(self, splitter: ThoughtSplitter, new: str, final: bool) -> tuple[str, str]:
        """Return the parts of a new piece of text that belong to the answer and to the thoughts."""
        parts = [*splitter.feed(new), *(splitter.rest() if final else ())]
        self._thought_tokens.add_parts(parts)
        self._text_before_answer.add("".join(part.text for part in parts if part.kind is not TextKind.ANSWER))
        thinking = "".join(part.text for part in parts if part.kind is TextKind.THOUGHT)
        if self._calls_in_thoughts is not None:
            thinking = self._calls_in_thoughts.feed(thinking, closed=not splitter.is_inside)
        self._thinking.add(thinking)
        return "".join(part.text for part in parts if part.kind is TextKind.ANSWER), thinking


class ThoughtCallReader:
    """Reads tool calls at the end of thoughts that the model forgot to close.

    Such a call counts if it begins with the token that opens calls, is complete, fits its schema, and is the last that
    the model writes. All others are thoughts: a model that only thinks about a tool runs none. A call is held back
    until that is known.
    """

    def __init__(self, calls: AllowedCalls, key: str) -> None:
        self.calls: tuple[ToolCall, ...] = ()
        """The calls that count, when the answer has ended."""
        self.notes: list[str] = []
        self._key = key
        self._allowed_calls = calls
        self._opens = False
        self._parser: CallParser | None = None
        self._held_texts: list[str] = []
        self._deltas: tuple[CallDelta, ...] = ()

    def note_token(self, token: int) -> None:
        """Note which token wrote the next text."""
        self._opens = token == self._allowed_calls.format.opener

    def feed(self, thought_text: str, closed: bool) -> str:
        """Take the next text of the thoughts, the last if `closed`. Return the text that certainly is a thought."""
        certain = ""
        if self._parser is None:
            trigger_start = thought_text.rfind(self._allowed_calls.format.trigger) if self._opens else -1
            if trigger_start < 0:
                return thought_text
            certain = strip_blanks(thought_text[:trigger_start])
            thought_text = thought_text[len(certain) :]
            self._parser, self._held_texts, self._deltas = (
                self._allowed_calls.make_parser(self._key, streaming=False),
                [],
                (),
            )
            assert self._parser is not None
        self._held_texts.append(thought_text)
        text, deltas = self._parser.feed(thought_text)
        self._deltas += deltas
        return certain + self._release_held() if closed or text.strip() else certain

    def finish(self, turn_ended: bool, thinking: str) -> tuple[str, tuple[CallDelta, ...]]:
        """Return what was held back, as thoughts or tool calls: no more text comes. `thinking` is the text before."""
        if turn_ended and self._parser is not None:
            _, deltas = self._parser.finish()
            if self._parser.ends_with_calls and not self._parser.notes:
                self.calls = self._parser.calls
                return "", self._deltas + deltas
        rest = self._release_held()
        if self._allowed_calls.format.trigger and self._allowed_calls.format.trigger in thinking + rest:
            self.notes.append(
                "the answer ended within its thoughts, so what looks like a call there was not taken as one"
            )
        return rest, ()

    def _release_held(self) -> str:
        """Return the text that was held back: it is no call."""
        held_text, self._parser, self._held_texts = "".join(self._held_texts), None, []
        return held_text


# Stop conditions: stop strings in a growing text, and stop token ids.


_CHARACTER_BITS = 21
"""Bits of a Unicode code point. A key of `StopStringTable` is made of a node and a character."""


class StopStringTable:
    """An automaton that finds any of several stop strings in one pass over a text (Aho and Corasick, 1975).

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
        """Return the node after a character: the longest prefix of a stop string that the text so far ends with."""
        while (child := self._children.get(node << _CHARACTER_BITS | code)) is None and node:
            node = self._shorter[node]
        return child or 0

    def _add(self, stop: str) -> Iterable[tuple[int, int, int]]:
        """Add the nodes of one string. Yield each new node as (its parent, the character, the node)."""
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


class StopStringFilter:
    """Passes a text on, piece by piece, up to the first stop string.

    The stop string that is *complete* first ends the text, as if characters came one at a time. So the result does not
    depend on how the text is cut. Of several that are complete at the same character, the longest counts. Characters
    that may belong to a stop string are held back. The time per character does not depend on the length of the text.
    """

    def __init__(self, table: StopStringTable) -> None:
        self._table = table
        self._node = 0
        self._held_text = ""
        self.stopped = False
        self.matched_string = ""
        """The stop string that is complete; empty if none is."""

    def feed(self, new: str) -> str:
        """Take the next text. Return what is certainly before a stop string. Text after a stop string is ignored."""
        if self.stopped:
            return ""
        if not self._table:
            return new
        text, node, advance, complete = self._held_text + new, self._node, self._table.advance, self._table.complete
        for end, char in enumerate(new, len(self._held_text) + 1):
            node = advance(node, ord(char))
            if complete[node]:
                self.stopped = True
                self._held_text = ""
                self.matched_string = text[end - complete[node] : end]
                return text[: end - complete[node]]
        self._node = node
        safe = len(text) - self._table.depth[node]
        self._held_text = text[safe:]
        return text[:safe]

    def rest(self) -> str:
        """Return the text that was held back, because no more text comes."""
        rest, self._held_text = self._held_text, ""
        return rest


@dataclass(frozen=True)
class StopConditions:
    """What ends a request's answers: stop strings, tokens, a limit of thoughts. Made once, on the submitting thread."""

    everywhere: StopStringTable = field(default_factory=StopStringTable)
    """Stop strings that also end thoughts: those that contain one of their tags."""
    in_answer: StopStringTable = field(default_factory=StopStringTable)
    """Stop strings of the answer only."""
    token_ids: frozenset[int] = frozenset()
    """Tokens that end an answer."""
    thinking: ThinkingLimit | None = None
    """What ends its thoughts."""

    @classmethod
    def from_params(
        cls, params: SamplingParams, eos_ids: Collection[int] = (), thoughts: Thoughts | None = None
    ) -> StopConditions:
        """Return the stop conditions of `params`, with the model's end tokens."""
        tags = () if thoughts is None else (thoughts.open, thoughts.close)
        tag_stops = [s for s in params.stop if any(tag in s for tag in tags)]
        answer_stops = [s for s in params.stop if s not in tag_stops]
        token_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_ids)
        return cls(StopStringTable(tag_stops), StopStringTable(answer_stops), token_ids)


# Split a model's thoughts from its answer while the text streams.


class TextKind(Enum):
    """Whether a part of a model's text is a thought, the answer, or tags and blanks between them."""

    MARKUP = "markup"
    THOUGHT = "thought"
    ANSWER = "answer"


@dataclass(frozen=True)
class TextPart:
    """A part of a model's text that is of one kind."""

    text: str
    kind: TextKind


class _SplitState(Enum):
    """How far a ThoughtSplitter has come in an answer's text."""

    BEFORE = "nothing has come, or only blanks"
    OPENED = "right after the tag that opens thoughts"
    INSIDE = "in the thoughts"
    CLOSED = "right after the tag that closes them"
    ANSWER = "in the answer"


class ThoughtSplitter:
    """Splits a stream of text into thoughts, the answer after them, and the tags and blanks between the two.

    Thoughts come first. The prompt opens them (`begun`), or the text does, with only blanks before the tag. Once the
    answer has begun, a tag is a part of it, for example in code. The parts together are the text, and do not depend on
    how it was cut. The time per character does not depend on the length of the text.
    """

    def __init__(self, thoughts: Thoughts) -> None:
        self._thoughts = thoughts
        self._state = _SplitState.OPENED if thoughts.opened_by_prompt else _SplitState.BEFORE
        self._may_repeat_tag = thoughts.opened_by_prompt
        self._held_text = ""

    @property
    def is_over(self) -> bool:
        """Whether the thoughts have ended, so that all further text belongs to the answer."""
        return self._state is _SplitState.ANSWER and not self._held_text

    @property
    def is_inside(self) -> bool:
        """Whether the next text belongs to the thoughts."""
        return self._state in (_SplitState.OPENED, _SplitState.INSIDE)

    @property
    def closing_tag_chars(self) -> int:
        """How many characters at the end of the text may begin the tag that closes the thoughts."""
        return partial_tag_length(self._thoughts.close, self._held_text) if self._state is _SplitState.INSIDE else 0

    def feed(self, text: str) -> Iterator[TextPart]:
        """Take the next text, and yield the parts that are certain now."""
        self._held_text += text
        return self._split_held(final=False)

    def rest(self) -> Iterator[TextPart]:
        """Yield what was held back because it could have become a tag: no more text comes."""
        return self._split_held(final=True)

    def _split_held(self, final: bool) -> Iterator[TextPart]:
        """Yield the parts of the held text that are certain; all of it if it is `final`."""
        while self._held_text:
            previous_state = self._state
            part = self._next_part(final)
            if part is not None and part.text:
                self._held_text = self._held_text[len(part.text) :]
                yield part
            elif previous_state is self._state:
                return

    def _next_part(self, final: bool) -> TextPart | None:
        """Return the first part of the held text if it is certain, and advance the state."""
        if self._state is _SplitState.BEFORE:
            return self._part_before_thoughts(final)
        if self._state is _SplitState.OPENED:
            return self._part_after_opening_tag(final)
        if self._state is _SplitState.INSIDE:
            return self._part_of_thoughts(final)
        if self._state is _SplitState.CLOSED:
            return self._leading_blanks(_SplitState.ANSWER)
        return TextPart(self._held_text, TextKind.ANSWER)

    def _part_before_thoughts(self, final: bool) -> TextPart | None:
        """Return a leading thinking tag and advance the state; None if a tag may still come, or if the answer began."""
        body = self._held_text.lstrip()
        blanks = len(self._held_text) - len(body)
        tags = {self._thoughts.open: _SplitState.OPENED, self._thoughts.skip_text: _SplitState.CLOSED}
        for tag, next_state in tags.items() if blanks <= MAX_TAG_BLANKS else ():
            if tag and body.startswith(tag):
                self._state = next_state
                return TextPart(self._held_text[: blanks + len(tag)], TextKind.MARKUP)
        if not final and blanks <= MAX_TAG_BLANKS and any(tag.startswith(body) for tag in tags if tag):
            return None
        self._state = _SplitState.ANSWER
        return None

    def _part_after_opening_tag(self, final: bool) -> TextPart | None:
        """Return the part after the opening tag. Some models repeat the tag that their prompt has opened."""
        if self._held_text[0].isspace():
            return self._leading_blanks(_SplitState.OPENED)
        tag = self._thoughts.open
        if self._may_repeat_tag and not final and tag.startswith(self._held_text) and self._held_text != tag:
            return None
        repeats_tag, self._may_repeat_tag = self._may_repeat_tag and self._held_text.startswith(tag), False
        if repeats_tag:
            return TextPart(tag, TextKind.MARKUP)
        self._state = _SplitState.INSIDE
        return None

    def _part_of_thoughts(self, final: bool) -> TextPart | None:
        """Return the certain part of the thoughts, or the tag that closes them."""
        text_before_tag, tag, _ = self._held_text.partition(self._thoughts.close)
        if tag:
            thought_text = strip_blanks(text_before_tag)
            if thought_text:
                return TextPart(thought_text, TextKind.THOUGHT)
            self._state = _SplitState.CLOSED
            return TextPart(text_before_tag + tag, TextKind.MARKUP)
        if final:
            return TextPart(self._held_text, TextKind.THOUGHT)
        certain = self._held_text[: len(self._held_text) - partial_tag_length(self._thoughts.close, self._held_text)]
        return TextPart(strip_blanks(certain), TextKind.THOUGHT)

    def _leading_blanks(self, next_state: _SplitState) -> TextPart | None:
        """Return the blanks at the beginning of the held text. If there are none, go to the state `next_state`."""
        blanks = len(self._held_text) - len(self._held_text.lstrip())
        if blanks:
            return TextPart(self._held_text[:blanks], TextKind.MARKUP)
        self._state = next_state
        return None


class ThinkingTokenCounter:
    """Counts the tokens that wrote an answer's thoughts: those whose text is at least partly in them. A token without
    text yet, such as half a character, counts at the place of the next text. Tags and the blanks around them do not
    count.
    """

    def __init__(self) -> None:
        self._token_ends = [0]
        self._thought_span = (0, 0)
        self._parted_chars = 0

    def add_token(self, new: str) -> None:
        """Add the text of the next token."""
        self._token_ends.append(self._token_ends[-1] + len(new))

    def add_parts(self, parts: Iterable[TextPart]) -> None:
        """Add the next parts into which the tokens' text was split."""
        for part in parts:
            part_start, self._parted_chars = self._parted_chars, self._parted_chars + len(part.text)
            if part.kind is TextKind.THOUGHT:
                self._thought_span = self._thought_span[0] if self._thought_span[1] else part_start, self._parted_chars

    @property
    def count(self) -> int:
        """How many tokens wrote the thoughts so far."""
        first, last = self._thought_span
        return sum(begin < last and first < max(end, begin + 1) for begin, end in pairwise(self._token_ends))


# A limit of thoughts: after so many tokens, the model is made to write the tag that closes them.


_MAX_SILENT = 3
"""How many tokens without text may come before the tag is forced. They are parts of a character, which has four bytes
at most.
"""

Encode = Callable[[str, bool], Sequence[int]]
"""Returns the tokens of a text, without those that a tokenizer adds if the flag is False."""


@dataclass(frozen=True)
class ThinkingLimit:
    """How many tokens a request's thoughts may have, and the tag that closes them. Made on the submitting thread."""

    tokens: int
    """How many tokens the thoughts may have."""
    close: str
    """The tag that closes them."""
    close_tokens: tuple[int, ...]
    first_token_chars: int
    """How many characters of the tag its first token has. If other tokens wrote fewer, the whole tag is forced: to a
    model, and to a grammar, a special token whose name is written out is no tag.
    """
    encode: Encode
    vocab_size: int

    @classmethod
    def for_request(
        cls, tokens: int | None, thoughts: Thoughts | None, encode: Encode, vocab_size: int
    ) -> ThinkingLimit | None:
        """Return the limit of a request; None if it has none, or if the model marks no thoughts."""
        if tokens is None or thoughts is None:
            return None
        close = thoughts.close
        close_tokens = tuple(encode(close, False))
        sizes = range(1, len(close))
        first_token_chars = next((n for n in sizes if tuple(encode(close[:n], False)) == close_tokens[:1]), len(close))
        return cls(tokens, close, close_tokens, first_token_chars, encode, vocab_size)


class ThinkingBudget:
    """Counts down how many tokens the thoughts of one answer may still have, then forces the closing tag.

    A token counts if the answer is in its thoughts before and after it. Tags do not count.
    """

    def __init__(self, limit: ThinkingLimit, text: TextStream) -> None:
        self._limit = limit
        self._text = text
        self._remaining_tokens = limit.tokens
        self._inside = text.in_thoughts
        self._forced_tokens: list[int] = []
        self._silent = 0
        self._is_over = False

    @property
    def may_force_soon(self) -> bool:
        """Whether one of the next two tokens may have to be forced."""
        return not self._is_over and (bool(self._forced_tokens) or self._remaining_tokens <= 1)

    @property
    def max_drafts(self) -> int:
        """How many tokens may be drafted with no chance that they exceed the limit."""
        return sys.maxsize if self._is_over else max(0, self._remaining_tokens - 1)

    def count_token(self, token: int) -> None:
        """Count the answer's next token, after `TextStream` has taken it."""
        if self._is_over:
            return
        inside, was_inside = self._text.in_thoughts, self._inside
        self._inside = inside
        self._silent = self._silent + 1 if self._text.silent else 0
        if self._forced_tokens:
            del self._forced_tokens[0]
            self._is_over = not self._forced_tokens
        elif was_inside and inside:
            self._remaining_tokens -= 1
        elif was_inside or self._text.thoughts_over:
            self._is_over = True

    def forced_tokens(self) -> Sequence[int]:
        """Return the tokens that must come next, often none: the rest of the closing tag once the limit is reached."""
        if not self._is_over and not self._forced_tokens and self._is_spent:
            written_chars = self._text.closing_tag_chars
            is_tag_started = written_chars >= self._limit.first_token_chars
            rest = (
                self._limit.encode(self._limit.close[written_chars:], False)
                if is_tag_started
                else self._limit.close_tokens
            )
            self._forced_tokens = list(rest)
        return self._forced_tokens

    def forced_masks(self) -> list[Mask]:
        """Return a mask for each forced token, which allows that token alone."""
        return [single_token_mask(token, self._limit.vocab_size) for token in self.forced_tokens()]

    @property
    def _is_spent(self) -> bool:
        """Whether the thoughts have no tokens left, and the text is not in the middle of a character."""
        return self._inside and self._remaining_tokens <= 0 and not 0 < self._silent <= _MAX_SILENT
