"""mlx-lm's tokenizer wrapper with text that is exactly what its tokenizer decodes."""

from __future__ import annotations

from typing import Any

from cortexmlx.models.tokenizers.alphabet import token_bytes
from cortexmlx.models.tokenizers.detokenize import ByteDetokenizer


def with_exact_text(tokenizer: Any) -> Any:
    """The same TokenizerWrapper; if its tokens are byte-level, its detokenizers are ours from now on.

    mlx-lm's own one for such tokens loses the first space of an answer, which is part of a continued text, shows NUL
    bytes as another character, fails on ids that a vocabulary leaves out, and takes longer per token the longer a run
    of broken UTF-8 gets. Other kinds of detokenizer stay as they are.
    """
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer

    if isinstance(tokenizer.detokenizer, BPEStreamingDetokenizer):
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        pieces = [b"" if token is None else token_bytes(token) for token in tokens]
        tokenizer._detokenizer = ByteDetokenizer(pieces)  # copied and reset for every request
    return tokenizer
