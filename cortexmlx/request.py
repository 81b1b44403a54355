"""Requests and completions as plain frozen data. No mlx, no threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NewType

from cortexmlx.errors import CortexError
from cortexmlx.logprobs import PromptLogprobs, TokenLogprob
from cortexmlx.progress import Progress
from cortexmlx.sampling_params import SamplingParams

if TYPE_CHECKING:
    pass


class FinishReason(StrEnum):
    """Why a completion ended; the values are those of the OpenAI API, plus `cancelled` and `error`."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class RequestState(StrEnum):
    """Where a request is in its life. The last three are final."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        """The request has ended."""
        return self in (RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED)


@dataclass(frozen=True)
class Thoughts:
    """How a model marks its thoughts: between the texts `open` and `close`, before its answer. `begun`: the prompt has
    opened them. `skipped` may stand before an answer without thoughts.
    """

    open: str
    close: str
    begun: bool = False
    skipped: str = ""


RequestId = NewType("RequestId", int)
"""Names a request of one engine. One with several answers is several jobs of the scheduler, each with a JobId."""


@dataclass(frozen=True)
class QueuedRequest:
    """A request that was checked, on its way to the scheduler: `prompt` in token ids, and `submitted`, when it came, on
    the performance counter. `client`, `background`, `cache` and `timeout` are those of `Engine.submit`. `scored` is the
    text whose tokens are to have their log-probabilities: the prompt, or that and one token more. `thoughts` are
    to be told from the answer.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    submitted: float = 0.0
    client: str | None = None
    background: bool = False
    scored: tuple[int, ...] = ()
    cache: bool = True
    timeout: float | None = None
    thoughts: Thoughts | None = None


@dataclass(frozen=True)
class Usage:
    """Token counts. `cached_tokens` of the prompt came from the prefix cache and were not computed again.
    `dropped_tokens` of prompt and answer the model did not see any more in the end (`keep_first`, `keep_last`).
    `thinking_tokens` of the completion wrote its thoughts, or a part of them; tags are not counted.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    dropped_tokens: int = 0
    thinking_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Timings:
    """Seconds from submission to the start of the prefill, to the first token and to the end; rates of either phase."""

    queued: float
    ttft: float
    total: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float


@dataclass(frozen=True)
class Completion:
    """A finished answer. Where messages were asked, `text` is without what the model thought before it, which is
    `thinking`; `raw_text` is all that it wrote, with the tags between the two. `index` counts the answers of one
    request when `n` > 1, and `others` of the first are the rest of them.

    `cumulative_logprob`, the sum over its tokens, is there if log-probabilities or `best_of` were asked for.
    `prompt_logprobs` has one for each token of the prompt, but None for the first, before which there is nothing; of a
    request that was cancelled, for as many as were computed.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] | None = None
    index: int = 0
    cumulative_logprob: float | None = None
    others: tuple[Completion, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    thinking: str = ""
    raw_text: str = ""

    def __post_init__(self) -> None:
        if not self.raw_text:
            object.__setattr__(self, "raw_text", self.text)


@dataclass(frozen=True)
class TokenEvent:
    """One piece of a streamed answer: `text` may be empty while it could still begin a stop string or half a character.
    `thinking` is a piece of the thoughts before it; tags are in neither.

    `dropped` tokens before this one are out of the model's sight since the event before (`keep_first`, `keep_last`).
    The last event of an answer has `finish_reason` and no token; the last of all has `completion`. Who is called with
    events (`on_event`) is told of a request that failed or was closed by a last event with `error`; who reads them is
    raised that error.

    While a prompt is computed that takes several steps, events with `progress` and no text say how many of its tokens
    are computed, a few times in a second at most. So they do for an answer that had to give up its memory, or goes on
    with a part of its text: then the tokens of the answer so far are among them.
    """

    text: str
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    completion: Completion | None = None
    index: int = 0
    error: CortexError | None = None
    dropped: int = 0
    progress: Progress | None = None
    thinking: str = ""

    @classmethod
    def failed(cls, error: CortexError) -> TokenEvent:
        """The last event of a request that ended with an error."""
        return cls("", finish_reason=FinishReason.ERROR, error=error)


Message = Mapping[str, object]
"""One chat message: `{"role": "user", "content": "..."}` and whatever else the model's chat template reads."""
