"""Byte-level tokenizers whose vocabulary has a merge of any two bytes: any wrong word boundary changes the tokens."""

from __future__ import annotations

from cortexmlx.models.tokenizers.base import SpecialTokens
from cortexmlx.models.tokenizers.bytelevel import ByteLevelTokenizer, PreTokenizerRule, find_pre_tokenizer

ALPHABET = "aAsStl'’ 0123½Ⅳ\n\r\t.!/$_éÉß漢ǅʰ\u0301\u200b🙂"


def byte_chars() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(0x100 + len(table) - len(printable))
    return table


CHARS = byte_chars()


def vocabulary() -> tuple[list[str], list[str]]:
    """All bytes, and a merge of every two bytes that the alphabet uses."""
    used = sorted({CHARS[byte] for byte in ALPHABET.encode()})
    merges = [f"{a} {b}" for a in used for b in used]
    return [CHARS[b] for b in range(256)] + [m.replace(" ", "") for m in merges], merges


TOKENS, MERGES = vocabulary()
NONE = SpecialTokens()
SPECIALS = ["<|begin|>", "<|end|>"]
SMOLLM = find_pre_tokenizer("smollm", "a.gguf")


def build(rule: PreTokenizerRule = SMOLLM, special: SpecialTokens = NONE, **kwargs: object) -> ByteLevelTokenizer:
    """Behind the vocabulary come two control tokens, SPECIALS, and one that a user made."""
    types = [1] * len(TOKENS) + [3] * len(SPECIALS) + [4]
    return ByteLevelTokenizer([*TOKENS, *SPECIALS, "user made"], MERGES, types, rule, special, **kwargs)  # type: ignore[arg-type]
