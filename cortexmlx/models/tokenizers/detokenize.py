"""Incremental detokenizing: linear time, and never half a character."""

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
    """Streaming text of tokens: the same interface as mlx-lm's detokenizers, one object per request.

    `text` is everything that is certain so far, `last_segment` what became certain since it was last read, `tokens`
    what was fed in. Bytes of an unfinished character wait for the next token; `finalize` turns what never became one
    into U+FFFD.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all text and tokens."""
        self._text = _Text()
        self.tokens: list[int] = []

    @abstractmethod
    def add_token(self, token: int) -> None:
        """Feed one token id. Ids beyond the vocabulary (a padded embedding can produce them) add no text."""

    @abstractmethod
    def finalize(self) -> None:
        """No more tokens: flush an unfinished character as U+FFFD."""

    @abstractmethod
    def bytes_of(self, token: int) -> bytes:
        """What one token stands for by itself, which may be part of a character: no bytes beyond the vocabulary."""

    @property
    def text(self) -> str:
        """All certain text so far."""
        return self._text.all()

    @property
    def last_segment(self) -> str:
        """The text that became certain since this property was last read."""
        return self._text.unread()


class ByteDetokenizer(Detokenizer):
    """Each token stands for bytes, and the text is the UTF-8 decoding of them all."""

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
    """What happens to the spaces that a text's first pieces are marked with: sentencepiece adds one of them itself."""

    KEEP = "keep"
    DROP_ONE = "drop one"
    DROP_ALL = "drop all"


@dataclass(frozen=True)
class Piece:
    """A sentencepiece piece as text, with spaces for its markers; or a byte; or a special token, which is not text.

    `marked`: it begins with such a marker (the unknown token's text begins with a space that is not one).
    """

    text: str
    marked: bool = False
    byte: int | None = None
    special: bool = False


class PieceDetokenizer(Detokenizer):
    """Each token is a piece of text or a single byte; bytes join into characters, those that do not become U+FFFD
    each.
    """

    def __init__(self, pieces: Sequence[Piece], leading: LeadingSpace) -> None:
        self._pieces = pieces
        self._leading = leading
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
        """Decode the pending bytes: whole characters as they are, every other byte as U+FFFD, a beginning kept
        waiting.
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
"""Tokens of a character, at most: of a byte each."""

_MOST_HELD = 16
"""Tokens that may wait for the end of a character: decoding them is work for each token that comes."""


class WindowDetokenizer(Detokenizer):
    """The text is what `decode` makes of all tokens together, where a token's own text depends on those before it: the
    text that the newest ones add to that of the ones just before them.
    """

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
        """A long run of broken text is no character that is still coming, but for its newest tokens."""
        told = len(self.tokens) - _CHARACTER_TOKENS
        certain = self._decode(self.tokens[self._begin : told])
        if len(certain) > len(before) and text.startswith(certain):
            self._text.append(certain[len(before) :])
            self._begin, self._appended = self._appended, told
