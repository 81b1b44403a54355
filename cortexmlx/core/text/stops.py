"""Stop conditions: stop strings in a growing text, and stop token ids."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from cortexmlx.core.text.budget import ThinkingLimit
from cortexmlx.structured.output import Thoughts
from cortexmlx.types.sampling_params import SamplingParams

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
