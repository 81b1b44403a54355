"""Incremental detokenizing, in linear time. A character appears only when all its bytes are there."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

_decoder_of = codecs.getincrementaldecoder("utf-8")


class _Text:
    """Text that grows at its end, read as a whole or piece by piece."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._unread: list[str] = []

    def append(self, text: str) -> None:
        if text:
            self._parts.append(text)
            self._unread.append(text)

    def all(self) -> str:
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def unread(self) -> str:
        segment = "".join(self._unread)
        self._unread.clear()
        return segment


class Detokenizer(ABC):
    """The streaming text of tokens. The interface is that of mlx-lm's detokenizers. Each request has its own object.

    - `text`: all text that is final so far.
    - `last_segment`: the text that became final since it was last read.
    - `tokens`: the tokens that were added.

    Bytes of an unfinished character wait for the next token. `finalize` turns bytes that never became a character into
    U+FFFD.
    """

    drops_space = False
    """Whether a space at the beginning of an answer is no part of its text."""
    exact = True
    """Whether `bytes_of` each token, joined, are the bytes of the text, apart from that space."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all text and tokens."""
        self._text = _Text()
        self.tokens: list[int] = []

    @abstractmethod
    def add_token(self, token: int) -> None:
        """Add one token id. An id beyond the vocabulary, which a padded embedding can produce, adds no text."""

    @abstractmethod
    def finalize(self) -> None:
        """End the text: an unfinished character becomes U+FFFD."""

    @abstractmethod
    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that one token stands for, which may be part of a character. They are empty for an id beyond
        the vocabulary.
        """

    @property
    def text(self) -> str:
        """All text that is final so far."""
        return self._text.all()

    @property
    def last_segment(self) -> str:
        """The text that became final since this property was last read."""
        return self._text.unread()


class ByteDetokenizer(Detokenizer):
    """A detokenizer for tokens that stand for bytes. The text is the UTF-8 decoding of all bytes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._decoder = _decoder_of(errors="replace")

    def add_token(self, token: int) -> None:
        self.tokens.append(token)
        if 0 <= token < len(self._pieces):
            self._text.append(self._decoder.decode(self._pieces[token]))

    def finalize(self) -> None:
        self._text.append(self._decoder.decode(b"", final=True))

    def bytes_of(self, token: int) -> bytes:
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""


class LeadingSpace(Enum):
    """What happens to the marker spaces at the beginning of a text. sentencepiece itself adds one of them."""

    KEEP = "keep"
    DROP_ONE = "drop one"
    DROP_ALL = "drop all"


@dataclass(frozen=True)
class Piece:
    """A sentencepiece piece: a text with spaces for its markers, a byte, or a special token, which is not text."""

    text: str
    marked: bool = False
    """Whether the text begins with such a marker. The unknown token's text begins with a space that is no marker."""
    byte: int | None = None
    special: bool = False


class PieceDetokenizer(Detokenizer):
    """A detokenizer for tokens that are pieces of text or single bytes. Bytes join into characters. Each byte that does
    not becomes U+FFFD.
    """

    def __init__(self, pieces: Sequence[Piece], leading: LeadingSpace) -> None:
        self._pieces = pieces
        self._leading = leading
        self.drops_space = leading is not LeadingSpace.KEEP
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._pending = b""
        self._drop = self._leading

    def add_token(self, token: int) -> None:
        self.tokens.append(token)
        if not 0 <= token < len(self._pieces):
            return
        piece = self._pieces[token]
        if piece.byte is not None:
            self._drop = LeadingSpace.KEEP
            self._pending += bytes([piece.byte])
            self._flush(final=False)
            return
        self._flush(final=True)
        self._text.append(piece.text if piece.special else self._without_leading(piece))

    def finalize(self) -> None:
        self._flush(final=True)

    def bytes_of(self, token: int) -> bytes:
        if not 0 <= token < len(self._pieces):
            return b""
        piece = self._pieces[token]
        return piece.text.encode("utf-8", "replace") if piece.byte is None else bytes([piece.byte])

    def _without_leading(self, piece: Piece) -> str:
        drop, text = self._drop, piece.text
        if drop is LeadingSpace.DROP_ALL and piece.marked:
            text = text.lstrip(" ")
            if not text:
                return ""
        self._drop = LeadingSpace.KEEP
        return text.removeprefix(" ") if drop is LeadingSpace.DROP_ONE and piece.marked else text

    def _flush(self, final: bool) -> None:
        """Decode the pending bytes: whole characters as they are, every other byte as U+FFFD. Unless `final`, the
        beginning of a character stays pending.
        """
        while self._pending:
            try:
                self._text.append(self._pending.decode("utf-8"))
            except UnicodeDecodeError as error:
                self._text.append(self._pending[: error.start].decode("utf-8"))
                self._pending = self._pending[error.start :]
                if not final and error.reason == "unexpected end of data":
                    return
                self._text.append("\ufffd")
                self._pending = self._pending[1:]
            else:
                self._pending = b""


_CHARACTER_TOKENS = 4
"""The most tokens that a character can have: one per byte."""

_MOST_HELD = 16
"""The most tokens that may wait for the end of a character. All of them are decoded again for each new token."""


class WindowDetokenizer(Detokenizer):
    """A detokenizer for tokens whose text depends on the tokens before them. The text is what `decode` returns for all
    tokens together.

    Each step decodes only the newest tokens and those just before them, and appends what the newest ones add.
    """

    exact = False

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._begin = self._appended = 0

    def add_token(self, token: int) -> None:
        self.tokens.append(token)
        self._grow(final=False)

    def finalize(self) -> None:
        self._grow(final=True)

    def bytes_of(self, token: int) -> bytes:
        return self._decode([token]).encode("utf-8", "replace")

    def _grow(self, final: bool) -> None:
        before = self._decode(self.tokens[self._begin : self._appended])
        text = self._decode(self.tokens[self._begin :])
        if final or (len(text) > len(before) and not text.endswith("\ufffd")):
            self._text.append(text[len(before) :])
            self._begin, self._appended = self._appended, len(self.tokens)
        elif len(self.tokens) - self._appended > _MOST_HELD:
            self._append_all_but_a_character(before, text)

    def _append_all_but_a_character(self, before: str, text: str) -> None:
        """Append a long run of broken text, except its newest tokens: only these can still become a character."""
        certain_end = len(self.tokens) - _CHARACTER_TOKENS
        certain = self._decode(self.tokens[self._begin : certain_end])
        if len(certain) > len(before) and text.startswith(certain):
            self._text.append(certain[len(before) :])
            self._begin, self._appended = self._appended, certain_end
