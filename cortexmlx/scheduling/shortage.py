"""What does not fit: prompts that are too long, and jobs that counted on memory which the system refuses. No mlx."""

from __future__ import annotations

from collections.abc import Iterable

from cortexmlx.errors import PromptTooLong
from cortexmlx.scheduling.job import Job


def check_fits(tokens: int, count: str, context: int, capacity: int, longest: int) -> None:
    """Raise PromptTooLong if a prompt of `tokens` tokens, in words `count`, leaves no room for a token of an answer: in
    the model's `context`, or in the `longest` request; or if the cache, which holds `capacity`, has none for itself.
    """
    if tokens + 1 > context:
        raise PromptTooLong(f"the prompt has {count} tokens and the model's context is {context}: shorten the prompt")
    if tokens > capacity:
        raise PromptTooLong(
            f"the prompt has {count} tokens and the KV cache holds {capacity}: "
            "raise the KV memory (--kv-memory) or shorten the prompt"
        )
    if tokens + 1 > longest:
        raise PromptTooLong(
            f"the prompt has {count} tokens and a request may have {longest} with its answer: "
            "shorten the prompt or raise max_request_tokens"
        )


def fit(job: Job, capacity: int) -> None:
    """Let a job's answer end where a cache of `capacity` tokens is full; its last token needs no place there."""
    job.max_new_tokens = max(job.generated, min(job.max_new_tokens, capacity + 1 - job.prompt_length))


def fit_all(jobs: Iterable[Job], capacity: int) -> list[Job]:
    """`fit` for all. Returns those that can get no token more: their answer has reached its end, or their prompt
    alone is too long.
    """
    ended = []
    for job in jobs:
        fit(job, capacity)
        if job.generated >= job.max_new_tokens:
            ended.append(job)
    return ended
