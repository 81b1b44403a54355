"""The byte-level alphabet: how byte-level tokens write their bytes as characters."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1)
def byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the other 68 for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


def token_bytes(token: str) -> bytes:
    """The bytes that a byte-level token stands for; a token outside the alphabet (an added one) is its own UTF-8."""
    table = byte_of_char()
    try:
        return bytes([table[char] for char in token])
    except KeyError:
        return token.encode("utf-8")
