"""Telling a model's thoughts from its answer, while the text is still coming."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Part:
    """A piece of text, and whether it stands between `<think>` and `</think>`."""

    text: str
    thought: bool


@dataclass
class Folding:
    """Whether the thoughts of the answers to come are one line each."""

    folded: bool = False


class ThinkSplitter:
    """Cuts a stream of text at its think tags, which are dropped. A tag may arrive in pieces.

    `thinking` True: the prompt has opened the first thought already.
    """

    def __init__(self, *, thinking: bool = False) -> None:
        self._thinking = thinking
        self._held = ""

    def feed(self, text: str) -> Iterator[Part]:
        """The parts that are certain now."""
        self._held += text
        while True:
            tag = CLOSE if self._thinking else OPEN
            before, found, after = self._held.partition(tag)
            if not found:
                break
            if before:
                yield Part(before, self._thinking)
            self._thinking = not self._thinking
            self._held = after
        keep = _beginning_of(tag, self._held)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if certain:
            yield Part(certain, self._thinking)

    def rest(self) -> Iterator[Part]:
        """What was held back because it could have become a tag."""
        if self._held:
            yield Part(self._held, self._thinking)
        self._held = ""


def thoughts_of(text: str) -> str:
    """The thoughts of a whole answer, with an empty line between them."""
    splitter = ThinkSplitter()
    parts = [*splitter.feed(text), *splitter.rest()]
    return "\n\n".join(part.text.strip() for part in parts if part.thought)


def _beginning_of(tag: str, text: str) -> int:
    """How many characters at the end of `text` could begin `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
