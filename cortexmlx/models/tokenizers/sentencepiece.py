"""Tokenizing with sentencepiece itself, for models with a `tokenizer.model` or a GGUF vocabulary of that type.

So plain text gets exactly sentencepiece's tokens. sentencepiece does not recognise special tokens that are written in
the text, and a rendered chat template is full of them. So the text is cut at these first.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING

from cortexmlx.errors import ModelCorrupt
from cortexmlx.models.messages import one_line
from cortexmlx.models.tokenizers.base import SpecialTokens, Tokenizer
from cortexmlx.models.tokenizers.detokenize import LeadingSpace, PieceDetokenizer, StreamingDetokenizer, TokenPiece
from cortexmlx.models.tokenizers.least_tokens import TokenLowerBound, bound_for_character_vocabulary, zero_bound

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor


SPACE = "\u2581"
_SPACE_RUN = re.compile(r"\s*")


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer with a serialized sentencepiece model (as in `tokenizer.model`) and special tokens. Raises
    ModelCorrupt if the model cannot be read.

    - `added_tokens`: texts that stand for one id wherever they occur. Ids may be beyond the model's own pieces.
      Skipping special tokens skips these and control pieces, except those in `visible_tokens`.
    - `prefix_after_added`: text after such a token gets the model's leading space again, like text at the beginning.
    - `rstrip_tokens`: the spaces after these tokens are dropped.
    """

    def __init__(
        self,
        model: bytes,
        special: SpecialTokens,
        chat_template: str | None = None,
        added_tokens: Mapping[str, int] | None = None,
        prefix_after_added: bool = True,
        visible_tokens: Collection[str] = (),
        rstrip_tokens: Collection[str] = (),
    ) -> None:
        from sentencepiece import SentencePieceProcessor

        added_tokens = dict(added_tokens or {})
        try:
            self._start_core = SentencePieceProcessor(model_proto=model)
            self._inner_core = (
                self._start_core
                if prefix_after_added
                else SentencePieceProcessor(model_proto=remove_dummy_prefix(model))
            )
        except Exception as error:  # the library raises RuntimeError and others, all from parsing
            raise ModelCorrupt(f"sentencepiece cannot read the tokenizer: {one_line(error)}") from error
        core = self._start_core
        count = max([core.vocab_size(), *(index + 1 for index in added_tokens.values())])
        tokens = [core.id_to_piece(index) if index < core.vocab_size() else "" for index in range(count)]
        for text, index in added_tokens.items():
            tokens[index] = text
        super().__init__(tokens, special, chat_template)
        self._added_tokens = added_tokens
        self._hidden_tokens = added_tokens.keys() - set(visible_tokens)
        self._rstrip_tokens = frozenset(rstrip_tokens)
        self._added_pattern = (
            re.compile("|".join(map(re.escape, sorted(added_tokens, key=len, reverse=True)))) if added_tokens else None
        )
        self._pieces = [self._make_piece(index) for index in range(count)]
        dummy_prefix, no_extra_spaces = read_space_flags(model)
        self._leading_space = LeadingSpace.DROP_ONE if dummy_prefix else LeadingSpace.KEEP
        if no_extra_spaces:
            self._leading_space = LeadingSpace.DROP_ALL
        self._keeps_bytes, self._keeps_spaces = keeps_all_bytes(model), not (no_extra_spaces or rstrip_tokens)

    def _make_piece(self, index: int) -> TokenPiece:
        """Return what the token `index` stands for."""
        core = self._start_core
        text = self._tokens[index]
        if index >= core.vocab_size() or text in self._hidden_tokens or core.is_control(index):
            return TokenPiece(text, special=True)
        if core.is_byte(index):
            return TokenPiece("", byte=int(text[3:5], 16))
        if core.is_unknown(index):
            return TokenPiece(core.decode([index]))
        return TokenPiece(text.replace(SPACE, " "), has_marker=text.startswith(SPACE))

    def _encode_plain(self, text: str) -> list[int]:
        if self._added_pattern is None:
            return self._encode_run(self._start_core, text)
        ids: list[int] = []
        position = 0
        for match in self._added_pattern.finditer(text):
            ids += self._encode_run(self._inner_core if position else self._start_core, text[position : match.start()])
            ids.append(self._added_tokens[match[0]])
            spaces = _SPACE_RUN.match(text, match.end()) if match[0] in self._rstrip_tokens else None
            position = spaces.end() if spaces else match.end()
        return ids + self._encode_run(self._inner_core if position else self._start_core, text[position:])

    @staticmethod
    def _encode_run(core: SentencePieceProcessor, text: str) -> list[int]:
        """Return the ids of a text without added tokens."""
        return list(core.encode(text)) if text else []

    @cached_property
    def token_lower_bound(self) -> TokenLowerBound:
        """A lower bound for the number of tokens of any text, computed without tokenizing."""
        return bound_for_character_vocabulary(self._tokens, self._keeps_spaces) if self._keeps_bytes else zero_bound()

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        detokenizer = PieceDetokenizer(self._pieces, self._leading_space)
        for token in [ids] if isinstance(ids, int) else ids:
            special = 0 <= token < len(self._pieces) and self._pieces[token].special
            if not (special and skip_special_tokens):
                detokenizer.add_token(token)
        detokenizer.finalize()
        return detokenizer.text

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(index for index, piece in enumerate(self._pieces) if piece.special)

    @property
    def detokenizer(self) -> StreamingDetokenizer:
        return PieceDetokenizer(self._pieces, self._leading_space)


# Reading and writing sentencepiece's model format (a protocol buffer), as far as it is needed here.
#
# The protobuf classes that sentencepiece ships require one exact protobuf runtime. The few fields used here are simpler
# to handle directly. Field numbers are those of sentencepiece_model.proto.


BPE_MODEL_TYPE = 2


class PieceType(IntEnum):
    """The type of a sentencepiece token. GGUF token types use the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _encode_varint(value: int) -> bytes:
    """Encode a number as a protocol buffer's varint."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _encode_integer_field(field_number: int, value: int) -> bytes:
    """Encode a protocol buffer's field with an integer."""
    return _encode_varint(field_number << 3) + _encode_varint(value)


def _encode_bytes_field(field_number: int, value: bytes) -> bytes:
    """Encode a protocol buffer's field with bytes or a message."""
    return _encode_varint(field_number << 3 | 2) + _encode_varint(len(value)) + value


def _encode_piece(text: str, score: float, kind: int) -> bytes:
    """Encode a piece of the vocabulary: its text, score and type."""
    text_bytes = text.encode("utf-8")
    return _encode_bytes_field(
        1, _encode_bytes_field(1, text_bytes) + b"\x15" + struct.pack("<f", score) + _encode_integer_field(3, kind)
    )


def _encode_normalizer(add_dummy_prefix: bool, remove_extra_whitespaces: bool) -> bytes:
    """Encode the settings of sentencepiece's normalizer."""
    return _encode_bytes_field(
        3,
        _encode_bytes_field(1, b"identity")
        + _encode_integer_field(3, add_dummy_prefix)
        + _encode_integer_field(4, remove_extra_whitespaces)
        + _encode_integer_field(5, 1),
    )


def serialize_bpe_model(
    pieces: Sequence[str], scores: Iterable[float], types: Sequence[int], add_dummy_prefix: bool
) -> bytes:
    """Return a serialized sentencepiece BPE model of these pieces. Its only normalization writes spaces as U+2581."""
    body = b"".join(map(_encode_piece, pieces, scores, types))
    trainer = _encode_integer_field(3, BPE_MODEL_TYPE) + _encode_integer_field(35, int(PieceType.BYTE in types))
    return body + _encode_bytes_field(2, trainer) + _encode_normalizer(add_dummy_prefix, remove_extra_whitespaces=False)


def remove_dummy_prefix(model: bytes) -> bytes:
    """Return a serialized sentencepiece model changed so that it adds no space before a text.

    A message that appears twice in a protocol buffer is merged, and the later value wins. So appending is enough.
    """
    return model + _encode_bytes_field(3, _encode_integer_field(3, 0))


def _parse_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the field numbers and values of a well-formed protocol buffer, one that sentencepiece has already read."""
    position = 0

    def read_varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while position < len(message):
        key = read_varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, read_varint()
        else:
            length = {1: 8, 5: 4}.get(wire) or read_varint()
            yield key >> 3, message[position : position + length]
            position += length


def read_space_flags(model: bytes) -> tuple[bool, bool]:
    """Return `add_dummy_prefix` and `remove_extra_whitespaces` of a serialized model; each is true if it is not set."""
    flags = {3: True, 4: True}
    for field_number, value in _parse_fields(model):
        if field_number == 3 and isinstance(value, bytes):
            flags |= {number: bool(flag) for number, flag in _parse_fields(value) if number in flags}
    return flags[3], flags[4]


def keeps_all_bytes(model: bytes) -> bool:
    """Return whether a model keeps all bytes of a text: no rules change it, unknown characters become byte pieces."""
    rules: int | bytes = b""
    fallback: int | bytes = 0
    for field_number, value in _parse_fields(model):
        if isinstance(value, bytes) and field_number in (2, 3):
            fields = dict(_parse_fields(value))
            if field_number == 2:
                fallback = fields.get(35, fallback)
            else:
                rules = fields.get(2, rules)
    return bool(fallback) and not rules
