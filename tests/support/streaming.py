"""What a detokenizer shows of tokens that come one after the other."""

from __future__ import annotations

from typing import Any


def shown(detokenizer: Any, tokens: list[int]) -> list[str]:
    """What each token made certain, then what the end did."""
    segments = []
    for token in tokens:
        detokenizer.add_token(token)
        segments.append(detokenizer.last_segment)
        assert detokenizer.text == "".join(segments)
    detokenizer.finalize()
    segments.append(detokenizer.last_segment)
    assert detokenizer.text == "".join(segments) and detokenizer.tokens == tokens
    return segments


def streamed(tokenizer: Any, tokens: list[int]) -> str:
    """All that a tokenizer's detokenizer shows of these tokens."""
    return "".join(shown(tokenizer.detokenizer, tokens))
