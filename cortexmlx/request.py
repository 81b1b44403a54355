"""What a caller asks for and what comes back: plain frozen data, no mlx, no threads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from cortexmlx.errors import InvalidRequest


class FinishReason(str, Enum):
    """Why a completion ended; the values are those of the OpenAI API, plus `cancelled` and `error`."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class RequestState(str, Enum):
    """Where a request is in its life. The last three are final."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    `temperature` 0 is greedy. `top_p` in (0, 1], `top_k` 0 means all, `min_p` in [0, 1) relative to the best token.
    `repetition_penalty` divides (or multiplies, when negative) the logits of the last `repetition_context` tokens of prompt
    and answer, as mlx-lm does; `presence_penalty` and `frequency_penalty` subtract from the logits of generated tokens, as the
    OpenAI API does. `logit_bias` adds to single logits. `stop` strings end the answer and are not part of its text; `stop_token_ids`
    do the same for tokens. `max_tokens` None means: until the context is full. `seed` makes the tokens repeatable whatever
    else is in the batch. `logprobs` n asks for the log-probability of each token and of the n likeliest (0: only the chosen one).

    Raises InvalidRequest from `validate`, naming the parameter, its value and the range.
    """

    max_tokens: int | None = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_context: int = 20
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1
    priority: int = 0

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise InvalidRequest if a value is out of its range. `vocab_size` also bounds the token ids."""
        _check(self.max_tokens is None or _is_int(self.max_tokens, 1), "max_tokens", self.max_tokens, "an integer >= 1")
        _check(_is_number(self.temperature, 0.0), "temperature", self.temperature, "a number >= 0")
        _check(_is_number(self.top_p, 0.0, 1.0) and self.top_p > 0, "top_p", self.top_p, "a number in (0, 1]")
        _check(_is_int(self.top_k, 0), "top_k", self.top_k, "an integer >= 0 (0: all tokens)")
        _check(_is_number(self.min_p, 0.0, 1.0) and self.min_p < 1, "min_p", self.min_p, "a number in [0, 1)")
        _check(
            _is_number(self.repetition_penalty, 0.0) and self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "a number > 0 (1: none)",
        )
        _check(_is_int(self.repetition_context, 1), "repetition_context", self.repetition_context, "an integer >= 1")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(_is_number(getattr(self, name)), name, getattr(self, name), "a finite number")
        _check(self.seed is None or _is_int(self.seed), "seed", self.seed, "an integer")
        _check(self.logprobs is None or _is_int(self.logprobs, 0, 100), "logprobs", self.logprobs, "an integer in 0..100")
        _check(_is_int(self.n, 1), "n", self.n, "an integer >= 1")
        _check(_is_int(self.priority), "priority", self.priority, "an integer")
        _check(
            not isinstance(self.stop, str) and all(isinstance(s, str) and s for s in self.stop),
            "stop",
            self.stop,
            "a list of non-empty strings",
        )
        top = math.inf if vocab_size is None else vocab_size - 1
        known = f"token ids in 0..{top}" if vocab_size else "token ids >= 0"
        _check(all(_is_int(t, 0, top) for t in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, known)
        _check(
            all(_is_int(t, 0, top) and _is_number(b) for t, b in self.logit_bias.items()),
            "logit_bias",
            dict(self.logit_bias),
            f"a map from {known} to finite numbers",
        )


def _is_int(value: object, low: float = -math.inf, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float = -math.inf, high: float = math.inf) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high


def _check(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        raise InvalidRequest(f"{name} is {value!r}, but must be {wanted}")


@dataclass(frozen=True)
class TokenLogprob:
    """The natural-log probability of one generated token, and of the likeliest ones at its place, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """Token counts. `cached_tokens` of the prompt came from the prefix cache and were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Timings:
    """Seconds from submission. `ttft`: to the first token. `prefill` and `decode`: time computing each phase; rates in tokens/s."""

    queued: float
    ttft: float
    total: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float


@dataclass(frozen=True)
class Completion:
    """A finished answer. `index` counts the answers of one request when `n` > 1."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] | None = None
    index: int = 0


@dataclass(frozen=True)
class TokenEvent:
    """One piece of a streamed answer: `text` may be empty while it could still begin a stop string or an incomplete character.

    The last event has `finish_reason` and `completion`, and no token.
    """

    text: str
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    completion: Completion | None = None
    index: int = 0


Message = Mapping[str, object]
"""One chat message: `{"role": "user", "content": "..."}` and whatever else the model's chat template reads."""
