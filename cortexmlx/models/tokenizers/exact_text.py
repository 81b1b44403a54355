"""Exact text for mlx-lm's tokenizer wrapper: precisely what its tokenizer decodes."""

from __future__ import annotations

import json
import re
from typing import Any

from cortexmlx.models.tokenizers.alphabet import token_bytes
from cortexmlx.models.tokenizers.detokenize import (
    ByteDetokenizer,
    Detokenizer,
    LeadingSpace,
    Piece,
    PieceDetokenizer,
    WindowDetokenizer,
)

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def use_exact_detokenizer(tokenizer: Any) -> Any:
    """Give a TokenizerWrapper our detokenizers, for the kinds of tokens that are known here. Return the same wrapper.

    mlx-lm's detokenizers have these faults:

    - The one for byte-level tokens loses the first space of an answer, which is part of a continued text. It shows NUL
      bytes as another character, and fails on ids that a vocabulary leaves out. It takes longer per token as a run of
      broken UTF-8 gets longer.
    - The one for sentencepiece's tokens fails on ids beyond the vocabulary, which a padded embedding can produce.
    - The one for all other tokens loses the space at the beginning of a line.
    """
    exact = _detokenizer(tokenizer)
    if exact is not None:
        tokenizer._detokenizer = exact  # copied and reset for every request
    return tokenizer


def _detokenizer(tokenizer: Any) -> Detokenizer | None:
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, NaiveStreamingDetokenizer, SPMStreamingDetokenizer

    theirs = tokenizer.detokenizer
    if isinstance(theirs, BPEStreamingDetokenizer) or _is_byte_level(tokenizer):
        return ByteDetokenizer([b"" if token is None else token_bytes(token) for token in _tokens(tokenizer)])
    if isinstance(theirs, SPMStreamingDetokenizer):
        leading = LeadingSpace.DROP_ONE if theirs.trim_space else LeadingSpace.KEEP
        return PieceDetokenizer([_piece(token or "") for token in _tokens(tokenizer)], leading)
    return WindowDetokenizer(tokenizer.decode) if isinstance(theirs, NaiveStreamingDetokenizer) else None


def _tokens(tokenizer: Any) -> list[str | None]:
    tokens: list[str | None] = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return tokens


def _is_byte_level(tokenizer: Any) -> bool:
    """Return whether the tokens are byte-level. mlx-lm looks for this in tokenizer.json, which a folder with a separate
    vocabulary and merges file does not have.
    """
    core = getattr(getattr(tokenizer, "_tokenizer", None), "backend_tokenizer", None)
    decoder = getattr(core, "decoder", None)
    return decoder is not None and json.loads(decoder.__getstate__()).get("type") == "ByteLevel"


def _piece(token: str) -> Piece:
    byte = _BYTE.fullmatch(token)
    text = token.replace(_SPACE, " ")
    return Piece(text, marked=text.startswith(" "), byte=int(byte[1], 16) if byte else None)
