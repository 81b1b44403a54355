"""Reading and writing sentencepiece's model format (a protocol buffer), as far as it is needed here.

The protobuf classes that sentencepiece ships require one exact protobuf runtime. The few fields used here are simpler
to handle directly. Field numbers are those of sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum

BPE = 2


class PieceType(IntEnum):
    """The type of a piece. GGUF token types use the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _piece(text: str, score: float, kind: int) -> bytes:
    encoded = text.encode("utf-8")
    return _bytes(1, _bytes(1, encoded) + b"\x15" + struct.pack("<f", score) + _integer(3, kind))


def _normalizer(add_dummy_prefix: bool, remove_extra_whitespaces: bool) -> bytes:
    return _bytes(
        3,
        _bytes(1, b"identity") + _integer(3, add_dummy_prefix) + _integer(4, remove_extra_whitespaces) + _integer(5, 1),
    )


def bpe_model(pieces: Sequence[str], scores: Iterable[float], types: Sequence[int], add_dummy_prefix: bool) -> bytes:
    """Return a serialized BPE model of these pieces. Its only normalization writes spaces as U+2581."""
    body = b"".join(map(_piece, pieces, scores, types))
    trainer = _integer(3, BPE) + _integer(35, int(PieceType.BYTE in types))
    return body + _bytes(2, trainer) + _normalizer(add_dummy_prefix, remove_extra_whitespaces=False)


def without_dummy_prefix(model: bytes) -> bytes:
    """Return the same model without a space before the text.

    A message that appears twice in a protocol buffer is merged, and the later value wins. So appending is enough.
    """
    return model + _bytes(3, _integer(3, 0))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the field numbers and values of a well-formed message (one that sentencepiece has already read)."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(message):
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
        else:
            length = {1: 8, 5: 4}.get(wire) or varint()
            yield key >> 3, message[at : at + length]
            at += length


def leading_space_flags(model: bytes) -> tuple[bool, bool]:
    """Return `add_dummy_prefix` and `remove_extra_whitespaces` of a serialized model. Both are true if the model does
    not set them.
    """
    flags = {3: True, 4: True}
    for field, value in _fields(model):
        if field == 3 and isinstance(value, bytes):
            flags |= {number: bool(inner) for number, inner in _fields(value) if number in flags}
    return flags[3], flags[4]


def keeps_bytes(model: bytes) -> bool:
    """Return whether every byte of a text is in one of its pieces: no rules change the text, and unknown characters
    become byte pieces.
    """
    rules: int | bytes = b""
    fallback: int | bytes = 0
    for field, value in _fields(model):
        if isinstance(value, bytes) and field in (2, 3):
            inner = dict(_fields(value))
            if field == 2:
                fallback = inner.get(35, fallback)
            else:
                rules = inner.get(2, rules)
    return bool(fallback) and not rules
