"""Split a model's thoughts from its answer while the text streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from cortexmlx.structured.calls.reader import WIDEST, beginning_of, without_blanks
from cortexmlx.structured.output import Thoughts


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
