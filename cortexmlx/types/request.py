"""Requests and completions as plain frozen data. Without mlx or threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NewType

from cortexmlx.errors import CortexError, StructuredOutputError
from cortexmlx.structured.calls.format import AllowedCalls
from cortexmlx.structured.output import StructuredOutput, Thoughts
from cortexmlx.structured.tools import CallDelta, ToolCall
from cortexmlx.types.cache_report import CacheReport
from cortexmlx.types.embeddings import PoolingSpec
from cortexmlx.types.logprobs import PromptLogprobs, TokenLogprob
from cortexmlx.types.progress import Progress
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.types.images import ImageLayout  # with NumPy, which programs that import a request may not need


class FinishReason(StrEnum):
    """Why a completion ended. The values are those of the OpenAI API, and also `cancelled` and `error`."""

    STOP = "stop"
    TOOL_CALLS = "tool_calls"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class RequestState(StrEnum):
    """The stage that a request is in. The last three are final."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        """Whether a request in this state has ended."""
        return self in (RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED)


RequestId = NewType("RequestId", int)
"""The number of a request in its engine. A request with several answers is several jobs of the scheduler, each with a
JobId.
"""


@dataclass(frozen=True)
class AdapterKey:
    """Identifies the content of an adapter in an engine, whatever name the adapter has."""

    number: int
    """Its number in plans, from 1."""
    digest: bytes
    """A hash of its content. Prefixes are shared under it."""


@dataclass(frozen=True)
class QueuedRequest:
    """A checked, tokenized request. `client`, `background`, `cache`, `timeout`, `adapter` are as in `Engine.submit`."""

    prompt: tuple[int, ...]
    """The prompt's token ids."""
    params: SamplingParams
    seed: int = 0
    submit_time: float = 0.0
    """When it was submitted, on the performance counter."""
    client: str | None = None
    background: bool = False
    scored_tokens: tuple[int, ...] = ()
    """The text whose tokens get log-probabilities: the prompt, or the prompt and one more token."""
    cache: bool = True
    timeout: float | None = None
    thoughts: Thoughts | None = None
    """How thoughts are told apart from the answer; None: they are not."""
    calls: AllowedCalls | None = None
    """What the answer may call; None: nothing."""
    thinking_tag_length: int = 0
    """Tokens at the prompt's end that a later prompt may leave out: the beginning of the answer's thoughts."""
    anchor_length: int = 0
    """Tokens of the prompt that the next turn keeps: it may leave out the thoughts after them. 0: not known."""
    pooling: PoolingSpec | None = None
    """What is asked of the prompt's states, instead of an answer; None: an answer is asked for."""
    adapter: str | None = None
    adapter_key: AdapterKey | None = None
    """The adapter that this name stood for when the request was queued; None: the base model."""
    images: ImageLayout | None = None
    """The images in the prompt; None: there are none."""


@dataclass(frozen=True)
class Usage:
    """Token counts of an answer and its prompt."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Tokens of the prompt that came from the prefix cache and were not computed again."""
    dropped_tokens: int = 0
    """Tokens of prompt and answer that the model no longer saw at the end (`keep_first`, `keep_last`)."""
    thinking_tokens: int = 0
    """Tokens of the completion that wrote its thoughts, at least partly. Tags are not counted."""
    drafted_tokens: int = 0
    """Drafted tokens that were verified for the answer. How many there are depends on the run."""
    accepted_tokens: int = 0
    """Those of them that were right, so that they are tokens of the completion."""

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def tokens_per_step(self) -> float:
        """Tokens of the completion over the steps that computed them."""
        return self.completion_tokens / max(1, self.completion_tokens - self.accepted_tokens)


@dataclass(frozen=True)
class Timings:
    """Seconds from submission to the prefill's start, the first token (or the end) and the end; both phases' rates."""

    queued: float
    ttft: float
    total: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float


@dataclass(frozen=True)
class Completion:
    """A finished answer, with its text, tokens, usage and timings."""

    text: str
    """The answer. If messages were asked, it has no thoughts."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] | None = None
    index: int = 0
    """The number of the answer among those of its request."""
    cumulative_logprob: float | None = None
    """The sum over its tokens, if log-probabilities or `best_of` were asked for."""
    others: tuple[Completion, ...] = ()
    """The other answers of the request, in the first answer only."""
    prompt_logprobs: PromptLogprobs | None = None
    """One for each token of the prompt, None for the first token. If the request was cancelled, for as many as were
    computed.
    """
    thinking: str = ""
    """What the model thought before the answer."""
    raw_text: str = ""
    """All that the model wrote, with the tags between thoughts and answer."""
    structured: StructuredOutput | None = field(default=None, repr=False)
    """The form that was asked for."""
    notes: tuple[str, ...] = ()
    """What of a lenient schema, or of a tool's, was not enforced."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls of `tools`. A call that was cut, by `max_tokens` or a cancel, is none: without a grammar it is text."""
    stop_string: str | None = None
    """Which of `stop` ended the answer; None if none did."""
    cache_report: CacheReport | None = field(default=None, repr=False, compare=False)
    """How much of the prompt was found in the prefix cache, and why known tokens were computed again; in the first
    answer only.
    """

    def __post_init__(self) -> None:
        if not self.raw_text:
            object.__setattr__(self, "raw_text", self.text)

    @property
    def parsed(self) -> Any:
        """The value of an answer to a `structured` request: JSON as values, or as an object of the type that was asked
        for; the text of other forms. None without `structured`, and for an answer that calls tools. The text is read at
        each use.

        Raises StructuredOutputError if the answer was cut, by `max_tokens`, a stop string or a cancel.
        """
        if self.structured is None or self.tool_calls:
            return None
        if self.finish_reason is not FinishReason.STOP:
            raise StructuredOutputError(
                f"the answer ended by {self.finish_reason.value!r} after {self.usage.completion_tokens} tokens, before "
                "its form was complete: raise max_tokens, or ask for less"
            )
        return self.structured.parse(self.text)


@dataclass(frozen=True)
class TokenEvent:
    """One piece of a streamed answer.

    The last event of an answer has `finish_reason` and no token. The very last event has `completion`. If a request
    fails or is closed, `on_event` gets a last event with `error`, and a reader of the stream gets that error raised.
    """

    text: str
    """May be empty while it could still begin a stop string or is half a character."""
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    completion: Completion | None = None
    index: int = 0
    error: CortexError | None = None
    dropped: int = 0
    """Tokens that the model no longer sees since the event before (`keep_first`, `keep_last`)."""
    progress: Progress | None = None
    """While a prompt takes several steps, events without text say how many of its tokens are computed, a few times per
    second at most. The same happens when an answer had to give up its memory, or continues with a part of its text;
    then its own tokens so far are counted, too.
    """
    thinking: str = ""
    """A piece of the thoughts before the answer. Tags are in neither."""
    tool_calls: tuple[CallDelta, ...] = ()
    """Pieces of calls, which are in no text."""
    notes: tuple[str, ...] = ()
    """With `finish_reason`: those of the answer's Completion."""

    @classmethod
    def failed(cls, error: CortexError) -> TokenEvent:
        """Return the last event of a request that ended with an error."""
        return cls("", finish_reason=FinishReason.ERROR, error=error)


Message = Mapping[str, object]
"""One chat message: `{"role": "user", "content": "..."}`, with other keys that the model's chat template reads."""
