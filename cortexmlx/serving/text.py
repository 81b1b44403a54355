"""Text that is safe to show while tokens are still coming: no half characters, no piece of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """What a text stream needs of a streaming detokenizer, mlx-lm's or ours: it holds back half characters."""

    def add_token(self, token: int) -> None:
        """Take one token id."""

    def finalize(self) -> None:
        """No more tokens: whatever was held back becomes text."""

    @property
    def last_segment(self) -> str:
        """The text that was added since this was last read."""


class TextStream:
    """The text of one answer, piece by piece, ending before the first stop string.

    The stop string that is *complete* first ends the text, as if characters came one at a time, so the result doesn't
    depend on how tokens cut it; of several complete at the same character the longest counts. What could still become
    a stop string is held back. The time per token doesn't depend on the length of the answer.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._matchers = [_Matcher(s) for s in stop]
        self._shown: list[str] = []
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed. Tokens pushed after that are ignored."""
        return self._stopped

    @property
    def text(self) -> str:
        """Everything that `push` and `finish` have returned."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    def push(self, token: int) -> str:
        """Take one token id; returns the text that is now safe to show, often empty."""
        if self._stopped:
            return ""
        self._detokenizer.add_token(token)
        return self._show(self._safe(self._detokenizer.last_segment))

    def finish(self) -> str:
        """There are no more tokens: returns the rest of the text, held back until now."""
        if self._stopped:
            return ""
        self._detokenizer.finalize()
        safe = self._safe(self._detokenizer.last_segment)
        rest, self._held = self._held, ""
        return self._show(safe + rest)

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text

    def _safe(self, new: str) -> str:
        """The text up to a stop string that is complete, else up to the longest beginning of one."""
        if not self._matchers:
            return new
        text = self._held + new
        for end, char in enumerate(new, len(self._held) + 1):
            complete = [len(m.stop) for m in self._matchers if m.feed(char)]
            if complete:
                self._stopped = True
                self._held = ""
                return text[: end - max(complete)]
        safe = len(text) - max(m.matched for m in self._matchers)
        self._held = text[safe:]
        return text[:safe]


class _Matcher:
    """Finds one string in a stream: how much of its beginning the stream now ends with (Knuth, Morris, Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._shorter = [0] * len(stop)
        for i in range(1, len(stop)):
            self._shorter[i] = self._advance(self._shorter[i - 1], stop[i])

    def feed(self, char: str) -> bool:
        """Take a character; true if it completes the string."""
        self.matched = self._advance(self.matched, char)
        return self.matched == len(self.stop)

    def _advance(self, matched: int, char: str) -> int:
        while matched and self.stop[matched] != char:
            matched = self._shorter[matched - 1]
        return matched + (self.stop[matched] == char)
