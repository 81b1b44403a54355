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
from cortexmlx.models.tokenizers.least_tokens import parts_of

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
    - It is chosen by the decoder in tokenizer.json. Some files have the decoder of another kind of vocabulary: then
      answers have U+0120 or U+2581 for each space. What encodes the spaces says how the tokens write them.
    """
    exact = _detokenizer(tokenizer)
    if exact is not None:
        tokenizer._detokenizer = exact  # copied and reset for every request
    return tokenizer


def _detokenizer(tokenizer: Any) -> Detokenizer | None:
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, NaiveStreamingDetokenizer, SPMStreamingDetokenizer

    theirs = tokenizer.detokenizer
    core = getattr(getattr(tokenizer, "_tokenizer", None), "backend_tokenizer", None)
    written = [] if core is None else [*parts_of(core.normalizer), *parts_of(core.pre_tokenizer)]
    read = [] if core is None else list(parts_of(core.decoder))
    marking = [part for part in written if _marks(part)]
    bytewise = any(part["type"] == "ByteLevel" for part in written) and not marking
    others = len(read) > 1 and any(part["type"] == "ByteLevel" for part in read)
    if (bytewise and not others) or (isinstance(theirs, BPEStreamingDetokenizer) and not marking):
        return ByteDetokenizer([b"" if token is None else token_bytes(token) for token in _tokens(tokenizer)])
    if isinstance(theirs, SPMStreamingDetokenizer):
        return _of_pieces(tokenizer, theirs.trim_space)
    if marking and not any(map(_marks, read)):
        added = (part["type"] != "Replace" and part.get("prepend_scheme") != "never" for part in marking)
        return _of_pieces(tokenizer, any(added))
    return WindowDetokenizer(tokenizer.decode) if isinstance(theirs, NaiveStreamingDetokenizer) else None


def _marks(part: dict[str, Any]) -> bool:
    """Return whether a part of a core writes U+2581 for a space, or reads it as one."""
    return part["type"] in ("Metaspace", "Replace", "Prepend") and _SPACE in json.dumps(part, ensure_ascii=False)


def _of_pieces(tokenizer: Any, trim_space: bool) -> PieceDetokenizer:
    leading = LeadingSpace.DROP_ONE if trim_space else LeadingSpace.KEEP
    return PieceDetokenizer([_piece(token or "") for token in _tokens(tokenizer)], leading)


def _tokens(tokenizer: Any) -> list[str | None]:
    tokens: list[str | None] = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return tokens


def _piece(token: str) -> Piece:
    byte = _BYTE.fullmatch(token)
    text = token.replace(_SPACE, " ")
    return Piece(text, marked=text.startswith(" "), byte=int(byte[1], 16) if byte else None)
