"""A lower bound of a text's tokens, computed without tokenizing the text. So a text that can never fit is refused
early.

Every byte of a text ends up in exactly one token. Let m(b) be the length of the longest token that has byte b, and let
b be worth 1/m(b). The bytes of a token t are worth at most 1 together, because each of them has m(b) >= len(t). So a
text has at least as many tokens as its bytes are worth.

Some bytes are worth nothing: those that a tokenizer may drop, and those of which it may put any number into one token.
A tokenizer with a part that is not known here has no bound (0 for every text).
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from cortexmlx.models.tokenizers.alphabet import byte_level_token_bytes

if TYPE_CHECKING:
    import tokenizers

SPACE = "\u2581"
"""A space in tokens that are not byte-level."""

_CHUNK = 1 << 16
"""How many characters are counted at once."""

_COMPOSED = 16
"""Bytes that composing (NFC) may take from the end of one chunk and the beginning of the next. At most four characters
become one.
"""

_WHITESPACE = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B)))
_WHITESPACE += "\u2028\u2029\u202f\u205f\u3000"


class TokenLowerBound:
    """A lower bound for the number of tokens of a text, for one tokenizer, from the longest tokens that hold each
    byte.

    - `tokens`: the bytes of every token that can occur.
    - `uncounted_bytes`: the bytes that are worth nothing.
    - `spaces`: tokens write a space as U+2581.
    - `nfc`: the tokenizer composes a text (NFC) before it cuts the text.
    """

    def __init__(
        self, tokens: Iterable[bytes], uncounted_bytes: Iterable[int] = (), spaces: bool = False, nfc: bool = False
    ) -> None:
        max_lengths = [0] * 256
        for token in tokens:
            length = len(token)
            for byte in token:
                if max_lengths[byte] < length:
                    max_lengths[byte] = length
        if spaces:
            max_lengths[ord(" ")] = max(max_lengths[byte] for byte in (ord(" "), *SPACE.encode()))
        self._nfc = nfc
        self._worth = np.array([1 / max_length if max_length else 0.0 for max_length in max_lengths])
        self._worth[list(uncounted_bytes)] = 0.0

    def compute(self, text: str) -> int:
        """Return the lower bound for the number of tokens of `text`."""
        worth = sum(map(self._weigh_chunk, (text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK))))
        return math.floor(worth * (1 - 1e-9))  # so rounding never adds one

    def _weigh_chunk(self, chunk: str) -> float:
        """Return the lower bound of one chunk of a text, as a fraction."""
        if self._nfc and not unicodedata.is_normalized("NFC", chunk):
            return 0.0
        counts = np.bincount(np.frombuffer(chunk.encode("utf-8", "replace"), np.uint8), minlength=256)
        worth = float(counts @ self._worth)
        return max(0.0, worth - _COMPOSED) if self._nfc else worth


def zero_bound() -> TokenLowerBound:
    """Return the lower bound for an unknown tokenizer: 0 for every text."""
    return TokenLowerBound(())


def bound_for_byte_vocabulary(
    tokens: Iterable[bytes], whitespace_counts: bool = True, nfc: bool = False
) -> TokenLowerBound:
    """Return the lower bound for a byte-level vocabulary. A byte that is not a token by itself may be dropped."""
    token_list = list(tokens)
    single_bytes = {token[0] for token in token_list if len(token) == 1}
    uncounted_bytes = set(range(256)) - single_bytes
    if not whitespace_counts:
        uncounted_bytes |= set(_WHITESPACE.encode())
    return TokenLowerBound(token_list, uncounted_bytes, nfc=nfc)


def bound_for_character_vocabulary(
    tokens: Iterable[str], whitespace_counts: bool = True, nfc: bool = False
) -> TokenLowerBound:
    """Return the lower bound for a vocabulary written as characters, not bytes, with U+2581 for a space.

    Characters that are in no token must become byte tokens `<0x..>`. If one of the 256 byte tokens is missing, any
    number of characters may become one unknown token, so there is no bound.
    """
    vocabulary = set(tokens)
    if any(f"<0x{byte:02X}>" not in vocabulary for byte in range(256)):
        return zero_bound()
    encoded_tokens = [token.encode("utf-8", "replace") for token in vocabulary]
    single_bytes = [bytes([byte]) for byte in range(256)]
    uncounted_bytes = () if whitespace_counts else set(_WHITESPACE.encode()) | set(SPACE.encode())
    return TokenLowerBound([*encoded_tokens, *single_bytes], uncounted_bytes, spaces=True, nfc=nfc)


def bound_for_core(core: tokenizers.Tokenizer) -> TokenLowerBound:
    """Return the lower bound for a tokenizer of the tokenizers library: 0 for every text if a part of it is unknown."""
    normalizers, cutters = list(iterate_parts(core.normalizer)), list(iterate_parts(core.pre_tokenizer))
    model = core.model
    if type(model).__name__ != "BPE" or model.continuing_subword_prefix or model.end_of_word_suffix:
        return zero_bound()
    if not all(map(_normalizer_keeps_bytes, normalizers)) or not all(map(_pre_tokenizer_keeps_text, cutters)):
        return zero_bound()
    nfc = any(part["type"] == "NFC" for part in normalizers)
    added_tokens = core.get_added_tokens_decoder().values()
    whitespace_counts = not any(token.lstrip or token.rstrip for token in added_tokens)
    tokens = core.get_vocab(with_added_tokens=True)
    added_texts = [unicodedata.normalize(form, token.content) for form in ("NFC", "NFD") for token in added_tokens]
    added_texts += [token.content for token in added_tokens]
    if not any(part["type"] == "ByteLevel" for part in cutters):
        spaced_texts = [SPACE + text.replace(" ", SPACE) for text in added_texts]
        all_tokens = [*tokens, *spaced_texts]
        return (
            bound_for_character_vocabulary(all_tokens, whitespace_counts, nfc) if model.byte_fallback else zero_bound()
        )
    if any(part["type"] in ("Replace", "Metaspace", "Prepend") for part in (*normalizers, *cutters)):
        return zero_bound()
    encoded_tokens = [*map(byte_level_token_bytes, tokens), *(text.encode() for text in added_texts)]
    return bound_for_byte_vocabulary(encoded_tokens, whitespace_counts, nfc)


def iterate_parts(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a normalizer, pre-tokenizer or decoder as plain data. A sequence yields its own parts."""
    stack = [] if part is None else [json.loads(part.__getstate__())]
    while stack:
        data = stack.pop()
        children = next((data[name] for name in ("normalizers", "pretokenizers", "decoders") if name in data), None)
        if data["type"] == "Sequence" and children is not None:
            stack += children
        else:
            yield data


def _normalizer_keeps_bytes(part: dict[str, Any]) -> bool:
    """Return whether a normalizer only composes characters, adds a prefix, or writes spaces as the tokens do."""
    if part["type"] == "Replace":
        return bool(part["pattern"] == {"String": " "} and part["content"] == SPACE)
    return part["type"] in ("NFC", "Prepend")


def _pre_tokenizer_keeps_text(part: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer cuts a text without dropping any of it."""
    if part["type"] in ("Split", "Punctuation"):
        return bool(part["behavior"] != "Removed")
    if part["type"] == "Metaspace":
        return bool(part["replacement"] == SPACE)
    return part["type"] in ("ByteLevel", "Digits")
