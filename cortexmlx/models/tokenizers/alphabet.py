"""The byte-level alphabet of GPT-2: the characters with which byte-level tokens write their bytes."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1)
def alphabet_bytes() -> dict[str, int]:
    """Return the byte of each character in the alphabet: printable bytes as themselves, 68 others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    other_bytes = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + index): byte for index, byte in enumerate(other_bytes)})
    return table


def byte_level_token_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token. An added token with characters outside the alphabet is UTF-8."""
    table = alphabet_bytes()
    try:
        return bytes([table[char] for char in token])
    except KeyError:
        return token.encode("utf-8")
