"""Perplexity: windows over the tokens of a text. Each token is scored once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np

from cortexmlx.core.arguments import is_list
from cortexmlx.core.as_completed import AsCompleted
from cortexmlx.core.prompt import Prompt
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.types.sampling_params import SamplingParams

DEFAULT_CONTEXT = 2048
"""Tokens of a window by default, if the model and the KV memory have room for them."""

_ONLY_SCORED = SamplingParams(max_tokens=0, prompt_logprobs=0)

_MIN_CONTEXT = 2


@dataclass(frozen=True)
class TextWindow:
    """A window of a text: the tokens `start .. end`, of which those from `score_start` on are scored."""

    start: int
    score_start: int
    end: int


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a text, so far or in the end: after `windows` of `all_windows` windows."""

    nll: float
    """The sum of the negative natural-log probabilities of the scored tokens."""
    tokens: int
    """How many tokens were scored."""
    windows: int
    all_windows: int
    context: int
    stride: int
    computed_tokens: int
    """How many tokens the model has computed for that, in `seconds`."""
    seconds: float
    text_tokens: int
    """Tokens of the whole text."""
    text_bytes: int | None
    """Its bytes of UTF-8; None if it was given as tokens."""

    @property
    def perplexity(self) -> float:
        """The perplexity per token: `exp(nll / tokens)`."""
        try:
            return math.exp(self.nll / self.tokens)
        except OverflowError:
            return math.inf

    @property
    def bits_per_token(self) -> float:
        """The mean negative log2 probability of a token: `nll / tokens / ln 2`."""
        return self.nll / self.tokens / math.log(2)

    @property
    def bits_per_byte(self) -> float | None:
        """`bits_per_token` times tokens per byte, comparable between tokenizers; None if the text came as tokens."""
        return None if self.text_bytes is None else self.bits_per_token * self.text_tokens / self.text_bytes

    @property
    def tokens_per_second(self) -> float:
        """Tokens computed per second."""
        return self.computed_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class TokenizedText:
    """A tokenized text whose perplexity is measured."""

    tokens: Sequence[int]
    bos_tokens: tuple[int, ...]
    """The token with which every window begins, if the model's tokenizer begins texts with one."""
    bytes: int | None
    """Its bytes of UTF-8; None if it was given as tokens."""

    @classmethod
    def from_input(cls, text: str | Sequence[int], tokenizer: SharedTokenizer) -> TokenizedText:
        """Tokenize a text, or check a list of token ids. Raises InvalidRequest for anything else."""
        bos_tokens = _bos_tokens(tokenizer)
        if isinstance(text, str):
            data = (text.removeprefix(tokenizer.bos_token or "") if bos_tokens else text).encode("utf-8", "replace")
            return cls(tokenizer.encode(data.decode(), add_special_tokens=False), bos_tokens, len(data))
        tokens: list[Any] = list(text) if is_list(text) else [None]
        if not all(map(_is_integer, tokens)):
            raise InvalidRequest("a text to be scored is a text or a list of token ids")
        tokens = [int(token) for token in tokens]
        has_bos = bool(bos_tokens) and tuple(tokens[:1]) == bos_tokens
        return cls(tokens[1:] if has_bos else tokens, bos_tokens if has_bos else (), None)


def cut_windows(tokens: int, window_size: int, stride: int, first_scored: int) -> Iterator[TextWindow]:
    """Yield windows of at most `window_size` tokens over a text of `tokens` tokens. The first scores its tokens from
    index `first_scored` on. Each further one scores the next `stride` tokens, with as many before them as there is room
    for.
    """
    end = min(window_size, tokens)
    yield TextWindow(0, first_scored, end)
    while end < tokens:
        score_start, end = end, min(end + stride, tokens)
        yield TextWindow(max(0, end - window_size), score_start, end)


def measure_perplexity(
    text: TokenizedText,
    complete: Callable[[Iterable[Prompt], SamplingParams], AsCompleted],
    context: int,
    stride: int | None,
    on_window: Callable[[Perplexity], None] | None,
) -> Perplexity:
    """Return the perplexity of a text in windows of `context` tokens. `complete` is `Engine.as_completed`. `on_window`
    gets the result so far after each window, in the order in which they end. Raises InvalidRequest, and the error
    of a window that fails.
    """
    stride = context // 2 if stride is None else stride
    if not _is_integer(stride) or not 1 <= stride < context:
        raise InvalidRequest(
            f"stride is {stride!r}, but must be in 1..{context - 1}, less than the context of {context}"
        )
    first_scored = 0 if text.bos_tokens else 1
    count = len(text.tokens)
    if count <= first_scored:
        raise InvalidRequest(f"the text has {count} token{'s' * (count != 1)}: there is nothing to score")
    windows = list(cut_windows(count, context - len(text.bos_tokens), stride, first_scored))
    perplexity = Perplexity(0.0, 0, 0, len(windows), context, stride, 0, 0.0, count, text.bytes)
    start_time = time.perf_counter()
    prompts = ((*text.bos_tokens, *text.tokens[window.start : window.end]) for window in windows)
    with closing(complete(prompts, _ONLY_SCORED)) as completions:
        for index, result in completions:
            if isinstance(result, CortexError):
                raise result
            assert result.prompt_logprobs is not None
            cut = windows[index]
            scored_logprobs = result.prompt_logprobs.logprobs[cut.score_start - cut.end :]
            perplexity = replace(
                perplexity,
                nll=perplexity.nll - float(np.sum(scored_logprobs, dtype=np.float64)),
                tokens=perplexity.tokens + len(scored_logprobs),
                windows=perplexity.windows + 1,
                computed_tokens=perplexity.computed_tokens + result.usage.prompt_tokens - 1,  # not the last
                seconds=time.perf_counter() - start_time,
            )
            if on_window is not None:
                on_window(perplexity)
    return perplexity


def choose_window_size(requested_context: int | None, max_context: int) -> int:
    """Return how many tokens a window has: `requested_context` or a default. Raises InvalidRequest if out of range."""
    context = min(DEFAULT_CONTEXT, max_context) if requested_context is None else requested_context
    if not _is_integer(context) or not _MIN_CONTEXT <= context <= max_context:
        raise InvalidRequest(
            f"context is {context!r}, but must be in {_MIN_CONTEXT}..{max_context}: what the model and the KV memory "
            "have room for"
        )
    return context


def _is_integer(value: object) -> bool:
    """Return whether a value is an integer other than a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _bos_tokens(tokenizer: SharedTokenizer) -> tuple[int, ...]:
    """Return the BOS token if the tokenizer begins texts with one, or else nothing."""
    bos = tokenizer.bos_token
    bos_ids = () if bos is None else tuple(tokenizer.encode(bos, add_special_tokens=False))
    return bos_ids if len(bos_ids) == 1 and tuple(tokenizer.encode("", add_special_tokens=True)[:1]) == bos_ids else ()
