"""The limits of a text's length: which of them ends an answer, and how a chat stays below them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cortexmlx.kv.sizing import format_bytes
from cortexmlx.request import Completion, FinishReason, SamplingParams

if TYPE_CHECKING:
    from cortexmlx.engine import Engine
    from cortexmlx.sessions.conversation import Conversation


def memory_is_the_limit(engine: Engine) -> bool:
    """The KV memory, and not the model's context, bounds how long a text may be."""
    return engine.longest_request < engine.info.context_length


def limit(engine: Engine) -> str:
    """What bounds the length of a text: `the context of 8,192 tokens`."""
    if memory_is_the_limit(engine):
        return f"the KV memory of {format_bytes(engine.stats().kv_bytes_limit)} ({engine.longest_request:,} tokens)"
    return f"the context of {engine.longest_request:,} tokens"


def ending(completion: Completion, params: SamplingParams, engine: Engine) -> str:
    """Why an answer has ended that the model would have gone on with; empty if it has not."""
    if completion.finish_reason is FinishReason.CANCELLED:
        return "stopped"
    if completion.finish_reason is not FinishReason.LENGTH:
        return ""
    if params.max_tokens is not None and completion.usage.completion_tokens >= params.max_tokens:
        return f"stopped at the token limit of {params.max_tokens:,}"
    return f"stopped: {limit(engine)} is full"


ANSWER_SHARE = 8
"""The turn that leaves less than an eighth of all that fits for its answer is one too many, if `max_tokens` is more."""

FREE_SHARE = 3
"""Then a third becomes free, if it can: what is left is computed anew, which should not happen at each turn."""


def make_room(talk: Conversation, question: str, engine: Engine) -> str:
    """Send so many of the oldest turns no more that `question` and its answer fit. What to tell; empty if all fits."""
    longest, before = engine.longest_request, talk.unread
    answer = min(talk.params.max_tokens or longest, longest // ANSWER_SHARE)
    tokens = talk.count(question)
    if tokens + answer <= longest:
        return ""
    dropped = talk.make_room(longest // FREE_SHARE, question)
    if talk.unread == len(talk.messages):  # a question so long that no third becomes free
        talk.unread = before
        dropped = talk.make_room(answer, question)
    if not dropped:
        return ""
    return (
        f"{limit(engine)} is full, with this question {tokens:,}: the model reads the {dropped} oldest messages no "
        f"more, which had {tokens - talk.count(question):,}. {advice(engine)}"
    )


def advice(engine: Engine) -> str:
    """How more would fit without leaving the chat."""
    if memory_is_the_limit(engine):
        return f"/set kv_memory SIZE gives it more ({format_bytes(engine.stats().kv_bytes_limit)} now)."
    return f"/set keep_last {engine.info.context_length // 4} lets a text outgrow the context."
