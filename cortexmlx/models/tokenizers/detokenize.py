"""Incremental detokenizing, in linear time. A character appears only when all its bytes are there."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum


class TextBuffer:
    """A text that grows piece by piece, in time linear in its length."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, text: str) -> None:
        """Append a piece."""
        if text:
            self._pieces.append(text)

    def getvalue(self) -> str:
        """Return the whole text."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""


class StreamingDetokenizer(ABC):
    """Turns tokens into text as they come, with the interface of mlx-lm's detokenizers. Each request has its own.

    - `text`: all text that is final so far.
    - `last_segment`: the text that became final since it was last read.
    - `tokens`: the tokens that were added.

    Bytes of an unfinished character wait for the next token. `finalize` turns bytes that never became a character into
    U+FFFD.
    """

    drops_space = False
    """Whether a space at the beginning of an answer is no part of its text."""
    exact = True
    """Whether `token_bytes` each token, joined, are the bytes of the text, apart from that space."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all text and tokens."""
        self._read_text = TextBuffer()
        self._unread: list[str] = []
        self.tokens: list[int] = []

    @abstractmethod
    def add_token(self, token: int) -> None:
        """Add one token id. An id beyond the vocabulary, which a padded embedding can produce, adds no text."""

    @abstractmethod
    def finalize(self) -> None:
        """End the text: an unfinished character becomes U+FFFD."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, which may be part of a character; empty for an id beyond the vocabulary."""

    @property
    def text(self) -> str:
        """All text that is final so far."""
        return self._read_text.getvalue() + "".join(self._unread)

    @property
    def last_segment(self) -> str:
        """The text that became final since the last read of this property."""
        segment = "".join(self._unread)
        self._unread.clear()
        self._read_text.add(segment)
        return segment


class ByteDetokenizer(StreamingDetokenizer):
    """A streaming detokenizer for byte-level tokens. The text is the UTF-8 decoding of all their bytes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._pending = b""

    def add_token(self, token: int) -> None:
        self.tokens.append(token)
        if 0 <= token < len(self._pieces):
            pending = self._pending + self._pieces[token]
            text, num_decoded = codecs.utf_8_decode(pending, "replace")
            self._pending = pending[num_decoded:]
            self._unread.append(text)

    def finalize(self) -> None:
        self._unread.append(self._pending.decode("utf-8", "replace"))
        self._pending = b""

    def token_bytes(self, token: int) -> bytes:
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""


class LeadingSpace(Enum):
    """What to do with the marker spaces at the beginning of a text. sentencepiece itself adds one of them."""

    KEEP = "keep"
    DROP_ONE = "drop one"
    DROP_ALL = "drop all"


@dataclass(frozen=True)
class TokenPiece:
    """What a sentencepiece token stands for: text with spaces for its markers, a byte, or a special token (no text)."""

    text: str
    has_marker: bool = False
    """Whether the text begins with such a marker. The unknown token's text begins with a space that is no marker."""
    byte: int | None = None
    special: bool = False


class PieceDetokenizer(StreamingDetokenizer):
    """A streaming detokenizer for sentencepiece's texts and bytes. Bytes that join no character become U+FFFD each."""

    def __init__(self, pieces: Sequence[TokenPiece], leading_space: LeadingSpace) -> None:
        self._pieces = pieces
        self._leading_space = leading_space
        self.drops_space = leading_space is not LeadingSpace.KEEP
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._pending = b""
        self._space_mode = self._leading_space

    def add_token(self, token: int) -> None:
        self.tokens.append(token)
        if not 0 <= token < len(self._pieces):
            return
        piece = self._pieces[token]
        if piece.byte is not None:
            self._space_mode = LeadingSpace.KEEP
            self._pending += bytes([piece.byte])
            self._flush_bytes(final=False)
            return
        self._flush_bytes(final=True)
        self._unread.append(piece.text if piece.special else self._strip_leading_space(piece))

    def finalize(self) -> None:
        self._flush_bytes(final=True)

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < len(self._pieces):
            return b""
        piece = self._pieces[token]
        return piece.text.encode("utf-8", "replace") if piece.byte is None else bytes([piece.byte])

    def _strip_leading_space(self, piece: TokenPiece) -> str:
        """Return a piece's text, without the leading spaces that are to be dropped at the beginning."""
        space_mode, text = self._space_mode, piece.text
        if space_mode is LeadingSpace.DROP_ALL and piece.has_marker:
            text = text.lstrip(" ")
            if not text:
                return ""
        self._space_mode = LeadingSpace.KEEP
        return text.removeprefix(" ") if space_mode is LeadingSpace.DROP_ONE and piece.has_marker else text

    def _flush_bytes(self, final: bool) -> None:
        """Decode the pending bytes, invalid ones to U+FFFD each. Unless `final`, a character's beginning is kept."""
        while self._pending:
            try:
                self._unread.append(self._pending.decode("utf-8"))
            except UnicodeDecodeError as error:
                self._unread.append(self._pending[: error.start].decode("utf-8"))
                self._pending = self._pending[error.start :]
                if not final and error.reason == "unexpected end of data":
                    return
                self._unread.append("\ufffd")
                self._pending = self._pending[1:]
            else:
                self._pending = b""


_CHARACTER_TOKENS = 4
"""The most tokens that a character can have: one per byte."""

_MAX_PENDING_TOKENS = 16
"""The most tokens that may wait for the end of a character. All of them are decoded again for each new token."""


class WindowDetokenizer(StreamingDetokenizer):
    """A streaming detokenizer for tokens whose text depends on the tokens before them. The text is what `decode`
    returns for all tokens together.

    Each step decodes only the newest tokens and those just before them, and appends what the newest ones add.
    """

    exact = False

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._window_start = self._appended_count = 0

    def add_token(self, token: int) -> None:
        self.tokens.append(token)
        self._append_new_text(final=False)

    def finalize(self) -> None:
        self._append_new_text(final=True)

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 of the text that the token has alone."""
        return self._decode([token]).encode("utf-8", "replace")

    def _append_new_text(self, final: bool) -> None:
        """Append the text that the newest tokens add. Unless `final`, wait while it ends within a character."""
        appended_text = self._decode(self.tokens[self._window_start : self._appended_count])
        text = self._decode(self.tokens[self._window_start :])
        if final or (len(text) > len(appended_text) and not text.endswith("\ufffd")):
            self._unread.append(text[len(appended_text) :])
            self._window_start, self._appended_count = self._appended_count, len(self.tokens)
        elif len(self.tokens) - self._appended_count > _MAX_PENDING_TOKENS:
            self._append_settled_text(appended_text, text)

    def _append_settled_text(self, appended_text: str, text: str) -> None:
        """Append a long run of broken text except its newest tokens, since only these can still become a character."""
        settled_end = len(self.tokens) - _CHARACTER_TOKENS
        settled_text = self._decode(self.tokens[self._window_start : settled_end])
        if len(settled_text) > len(appended_text) and text.startswith(settled_text):
            self._unread.append(settled_text[len(appended_text) :])
            self._window_start, self._appended_count = self._appended_count, settled_end
