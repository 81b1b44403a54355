"""The table of transcripts: for each client a bounded number of them, found by their longest common text."""

from __future__ import annotations

import secrets
import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from cortexmlx.models.tokenizers.fitting import named_ids
from cortexmlx.server.transcripts.answered import THOUGHTS, Answered
from cortexmlx.sessions.transcript import Encode, Transcript, common_length
from cortexmlx.sessions.turn import Render
from cortexmlx.types.request import Message

_PER_TOKEN = 40
"""Bytes that a token takes, roughly."""
_PER_CUT = 120
"""Bytes that a cut takes, roughly."""
_PER_TRANSCRIPT = 1500
"""Bytes that a transcript takes beside its texts and tokens, roughly: many of them are short."""

MOST_COMPARED = 256
"""How many of a client's transcripts that are equally near to a text are compared by their answers: more than a prompt
has answers.
"""


@dataclass(frozen=True)
class Remembered:
    """What a model read, and what it answered."""

    read: Transcript
    """All that it read."""
    place: int
    """How many messages that was. The answer is the next."""
    answered: Answered
    earlier: tuple[Answered, ...] = ()
    """Answers of the same conversation before that have calls."""
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    """Names it among all."""

    @property
    def size(self) -> int:
        """Bytes that it takes, roughly."""
        answers = sum(len(each.text) * 3 + len(each.tokens) * _PER_TOKEN for each in (self.answered, *self.earlier))
        read = len(self.read.text) + len(self.read.tokens) * _PER_TOKEN + len(self.read.cuts) * _PER_CUT
        return read + answers + _PER_TRANSCRIPT

    def continued(self, text: str, messages: Sequence[Message], encode: Encode, render: Render) -> Transcript:
        """Return the transcript of a rendered text, with this one's tokens as far as they go on."""
        if not text.startswith(self.read.text):
            return self.read.read(text, encode)
        said = self._as_rendered(text, messages, render)
        return self.read.wrote(self.answered.text if said is None else said, self.answered.tokens).read(text, encode)

    def is_begin_of(self, read: Transcript) -> bool:
        """Whether a transcript has all the tokens of this one, and of its answer."""
        whole = (*self.read.tokens, *self.answered.tokens)
        return len(read.tokens) > len(whole) and read.tokens[: len(whole)] == whole

    def answer_in(self, text: str, messages: Sequence[Message]) -> tuple[bool, int]:
        """Return how surely this answer follows in a text that begins with what was read: whether it is the next of
        the messages, and how many characters of it are in the text.
        """
        if not text.startswith(self.read.text):
            return False, 0
        said = len(messages) > self.place and self.answered.is_said_by(messages[self.place])
        begin = len(self.read.text)
        return said, common_length(self.answered.text, text[begin : begin + len(self.answered.text)])

    def _as_rendered(self, text: str, messages: Sequence[Message], render: Render) -> str | None:
        """Return how the template writes the answer in `text`, if that is not how the model wrote it; None if `text`
        does not have this answer, or it cannot be told where it ends.
        """
        end, own = self.answered.end, self.answered
        begin = len(self.read.text)
        if text.startswith(own.text, begin) or not end or len(messages) <= self.place:
            return None
        before, message = messages[: self.place], messages[self.place]
        if not own.is_said_by(message) or not own.thoughts_are_of(message) or own.has(end):
            return None
        if render(before) != self.read.text:
            return None
        place = text.find(end, begin)
        alone = render((*before, message)) if place >= 0 else None
        # Where the next message is written may depend on what follows: what is common to both surely is the answer.
        if alone is None or common_length(alone, text) < place + len(end):
            return None
        said = text[begin:place]
        if named_ids(said) != named_ids(own.text):
            return None  # the results of its calls have the ids that the template writes
        if own.thinking.strip():
            silent = render((*before, {**message, THOUGHTS: ""}))
            if own.thinking.strip() not in said or silent is None or silent.startswith(alone[: place + len(end)]):
                return None  # the template leaves thoughts out
        return said


class Shelf(Protocol):
    """Where transcripts outlive the process."""

    def read(self, most: int) -> list[tuple[str, Remembered]]:
        """Return transcripts of at most so many bytes with their clients, the oldest first."""

    def put(self, client: str, remembered: Remembered) -> None:
        """Keep a transcript."""

    def remove(self, remembered: Remembered) -> None:
        """Remove a transcript."""


class _Transcripts:
    """The transcripts of one client, by their use and by their texts."""

    def __init__(self) -> None:
        self.by_use: OrderedDict[str, Remembered] = OrderedDict()
        """By their ids, the least recently used first."""
        self._texts: list[tuple[str, int, str]] = []
        """The text of each with the number of its last use and its id, sorted."""
        self._uses: dict[str, int] = {}
        self._numbers = count()

    def add(self, remembered: Remembered) -> None:
        """Add a transcript as the one that was used last."""
        number = self._uses[remembered.id] = next(self._numbers)
        self.by_use[remembered.id] = remembered
        insort(self._texts, (remembered.read.text, number, remembered.id))

    def pop(self, id: str) -> Remembered | None:
        """Remove and return a transcript; None if there is none."""
        found = self.by_use.pop(id, None)
        if found is not None:
            del self._texts[bisect_left(self._texts, (found.read.text, self._uses.pop(id), id))]
        return found

    def near(self, text: str) -> list[Remembered]:
        """Return transcripts that have the most in common with a text, in the order of their use: of those that are a
        beginning of it, and of longer ones, `MOST_COMPARED` at most. Their neighbours among the sorted texts have no
        more in common with it than they, so nothing else is looked at.
        """
        texts, place = self._texts, bisect_left(self._texts, (text,))
        common = max((common_length(known, text) for known, _, _ in texts[max(0, place - 1) : place + 1]), default=0)
        if not common:
            return []
        begin = text[:common]
        first, end = bisect_left(texts, (begin,)), bisect_left(texts, (begin, next(self._numbers)))
        longer = texts[max(end, place - MOST_COMPARED // 2) : place + MOST_COMPARED // 2]
        found = texts[max(first, end - MOST_COMPARED) : end] + [each for each in longer if each[0].startswith(begin)]
        return [self.by_use[id] for _, _, id in sorted(found, key=lambda each: each[1])]


class Table:
    """The transcripts of all clients of one model. Any thread may use it.

    `most` bounds their bytes, roughly. Beyond it, the client with the most loses the one that was used least recently.
    What is on the `shelf` is read at the first use, and what is kept and lost afterwards is told to it.
    """

    def __init__(self, most: int, shelf: Shelf | None = None) -> None:
        self._most = most
        self._shelf = shelf
        self._unread = shelf is not None
        self._lock = threading.RLock()
        self._clients: dict[str, _Transcripts] = {}
        self._sizes: dict[str, int] = {}
        self._calls: dict[str, dict[str, list[Answered]]] = {}

    @property
    def size(self) -> int:
        """Bytes of all transcripts, roughly."""
        with self._lock:
            return sum(self._sizes.values())

    def all(self) -> list[tuple[str, Remembered]]:
        """Return all transcripts with their clients, for each the least recently used first."""
        with self._lock:
            return [(client, each) for client, kept in self._clients.items() for each in kept.by_use.values()]

    def nearest(self, client: str, text: str, messages: Sequence[Message]) -> Remembered | None:
        """Return a client's transcript that has the most in common with a rendered text; None if there is none. Of
        those that are equally near, it is one whose answer follows in `messages` or in the text, or else the one that
        was used last. The time does not depend on how many there are.
        """
        with self._lock:
            self._open()
            near = self._clients[client].near(text) if client in self._clients else []
        return max(reversed(near), key=lambda each: each.answer_in(text, messages), default=None)

    def answer_of(self, client: str, call: str) -> list[Answered]:
        """Return the answers of a client that have a call with this id."""
        with self._lock:
            self._open()
            return list(self._calls.get(client, {}).get(call, ()))

    def use(self, client: str, remembered: Remembered) -> None:
        """Say that a transcript was continued."""
        with self._lock:
            kept = self._clients.get(client)
            if kept is not None and kept.pop(remembered.id) is not None:
                kept.add(remembered)

    def keep(self, client: str, remembered: Remembered, instead_of: Remembered | None = None) -> None:
        """Keep a transcript, in the place of one that it continues."""
        with self._lock:
            self._open()
            if self._shelf is not None:
                self._shelf.put(client, remembered)
            if instead_of is not None:
                self._drop(client, instead_of.id)
            self._add(client, remembered)

    def _open(self) -> None:
        """Read what is on the shelf, once."""
        if self._unread and self._shelf is not None:
            self._unread = False
            for client, remembered in self._shelf.read(self._most):
                self._add(client, remembered)

    def _add(self, client: str, remembered: Remembered) -> None:
        self._clients.setdefault(client, _Transcripts()).add(remembered)
        self._sizes[client] = self._sizes.get(client, 0) + remembered.size
        for answer in (*remembered.earlier, remembered.answered):
            for call in answer.calls:
                self._calls.setdefault(client, {}).setdefault(call.id, []).append(answer)
        while sum(self._sizes.values()) > self._most:
            largest = max(self._sizes, key=lambda name: self._sizes[name])
            self._drop(largest, next(iter(self._clients[largest].by_use)))

    def _drop(self, client: str, id: str) -> None:
        kept = self._clients.get(client)
        lost = None if kept is None else kept.pop(id)
        if kept is None or lost is None:
            return
        self._sizes[client] -= lost.size
        calls = self._calls.get(client, {})
        for answer in (*lost.earlier, lost.answered):
            for call in answer.calls:
                known = calls[call.id]
                known.remove(answer)
                if not known:
                    del calls[call.id]
        if not kept.by_use:
            del self._clients[client], self._sizes[client]
            self._calls.pop(client, None)
        if self._shelf is not None:
            self._shelf.remove(lost)
