"""Stop strings in a text that is still coming."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """A text, piece by piece, up to the first stop string.

    The stop string that is *complete* first ends the text, as if characters came one at a time, so the result doesn't
    depend on how the text is cut; of several complete at the same character the longest counts. What could still become
    a stop string is held back. The time per character doesn't depend on the length of the text.
    """

    def __init__(self, stop: Iterable[str] = ()) -> None:
        self._matchers = [_Matcher(s) for s in stop]
        self._held = ""
        self.stopped = False

    def feed(self, new: str) -> str:
        """The text up to a stop string that is complete, else up to the longest beginning of one. What comes behind a
        stop string is ignored.
        """
        if self.stopped:
            return ""
        if not self._matchers:
            return new
        text = self._held + new
        for end, char in enumerate(new, len(self._held) + 1):
            complete = [len(m.stop) for m in self._matchers if m.feed(char)]
            if complete:
                self.stopped = True
                self._held = ""
                return text[: end - max(complete)]
        safe = len(text) - max(m.matched for m in self._matchers)
        self._held = text[safe:]
        return text[:safe]

    def rest(self) -> str:
        """There is no more text: what was held back."""
        rest, self._held = self._held, ""
        return rest


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
