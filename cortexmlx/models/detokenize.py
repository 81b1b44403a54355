"""Turning tokens into text one at a time, in linear time and without ever showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_decoder_of = codecs.getincrementaldecoder("utf-8")


class ByteDetokenizer:
    """Streaming text of byte-level tokens: each token stands for bytes, and text is the UTF-8 decoding of them all.

    `text` is everything that is certain so far, `last_segment` what was added since it was last read, `tokens` what was
    fed in. Bytes of an unfinished character wait for the next token; `finalize` turns what never became one into U+FFFD.
    The same interface as mlx-lm's detokenizers; one object per request.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self.reset()

    def reset(self) -> None:
        """Forget all text and tokens."""
        self._decoder = _decoder_of(errors="replace")
        self._parts: list[str] = []
        self._unread: list[str] = []
        self.tokens: list[int] = []

    def add_token(self, token: int) -> None:
        """Feed one token id. Ids beyond the vocabulary (a padded embedding can produce them) add no text."""
        self.tokens.append(token)
        if 0 <= token < len(self._pieces):
            self._append(self._decoder.decode(self._pieces[token]))

    def finalize(self) -> None:
        """No more tokens: flush an unfinished character as U+FFFD."""
        self._append(self._decoder.decode(b"", final=True))

    def _append(self, text: str) -> None:
        if text:
            self._parts.append(text)
            self._unread.append(text)

    @property
    def text(self) -> str:
        """All certain text so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def last_segment(self) -> str:
        """The text that became certain since this property was last read."""
        segment = "".join(self._unread)
        self._unread.clear()
        return segment
