"""What mlx-lm's own `generate_step` writes under llguidance's own matcher: a judge of structured answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BLANKS = r"(\x20|\x0A[\x20\x09]{0,40})"
"""The blanks that an answer in JSON may have: every schema of a judge needs them, too."""


def schema_grammar(schema: dict[str, Any]) -> str:
    """The grammar of a schema, as llguidance makes it."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(
        schema, defaults={} if "x-guidance" in schema else {"whitespace_pattern": BLANKS}
    )


def judge_tokenizer(tokenizer: Any) -> Any:
    """llguidance's view of a tokenizer that it reads itself."""
    import llguidance.hf

    return llguidance.hf.from_tokenizer(tokenizer._tokenizer, eos_token=sorted(tokenizer.eos_token_ids))


def constrained_greedy(
    model: Any, tokenizer: Any, prompt: Sequence[int], grammar: str, max_tokens: int, vocabulary: Any = None
) -> list[int]:
    """mlx-lm's greedy tokens under a grammar, up to the token with which the form is complete."""
    import mlx.core as mx
    import numpy as np
    from llguidance import LLMatcher
    from mlx_lm.generate import generate_step

    matcher = LLMatcher(vocabulary or judge_tokenizer(tokenizer), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    followed = 0

    def allow(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal followed
        for token in tokens[len(prompt) + followed :].tolist():
            followed += 1
            if not matcher.is_stopped():
                assert matcher.consume_token(token), matcher.get_error()
        if matcher.is_stopped():
            return logits
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.zeros(logits.shape[-1], bool)
        width = min(len(bits), len(allowed))
        allowed[:width] = bits[:width]
        return mx.where(mx.array(allowed), logits, -mx.inf)

    tokens: list[int] = []
    ends = LLMatcher(vocabulary or judge_tokenizer(tokenizer), grammar, log_level=0)
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=max_tokens, logits_processors=[allow]):
        tokens.append(int(token))
        assert ends.consume_token(tokens[-1]), ends.get_error()
        if ends.is_stopped():
            break
    return tokens


def forced_greedy(
    model: Any, prompt: Sequence[int], grammar: str, max_tokens: int, vocabulary: Any
) -> tuple[list[int], int]:
    """Greedy tokens under a grammar, with all tokens appended that llguidance's own matcher forces; and how many it
    forced.
    """
    import mlx.core as mx
    import numpy as np
    from llguidance import LLMatcher
    from mlx_lm.models.cache import make_prompt_cache

    matcher, cache = LLMatcher(vocabulary, grammar, log_level=0), make_prompt_cache(model)
    tokens: list[int] = []
    unread = list(prompt)
    forced = 0
    while len(tokens) < max_tokens and not matcher.is_stopped():
        run = matcher.compute_ff_tokens()[: max_tokens - len(tokens)]
        forced += len(run)
        if not run:
            logits = np.array(model(mx.array([unread]), cache=cache)[0, -1].astype(mx.float32))
            unread.clear()
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = np.zeros(len(logits), bool)
            allowed[: len(bits)] = bits[: len(logits)]
            run = [int(np.where(allowed, logits, -np.inf).argmax())]
        assert matcher.consume_tokens(run), matcher.get_error()
        tokens += run
        unread += run
    return tokens, forced
