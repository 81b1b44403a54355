"""Explain which limit ended an answer or refused a prompt, with numbers and the next step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cortexmlx.kv.sizing import format_bytes
from cortexmlx.request import Completion, FinishReason, SamplingParams

if TYPE_CHECKING:
    from cortexmlx.engine import Engine


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
