"""The statistics of an answer: as one line, or in full."""

from __future__ import annotations

from collections.abc import Sequence

from cortexmlx.cli.terminal.text import format_duration
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.types.request import Completion


def statistics_line(completion: Completion, end_reason: str) -> str:
    """Return the line below an answer: `24 tokens · 41.2 tok/s · TTFT 180 ms · prompt 37 tok (32 cached)`. It ends
    with `end_reason`, the reason if the answer was cut short.
    """
    usage, timings = completion.usage, completion.timings
    answers = (completion, *completion.others)
    tokens = sum(answer.usage.completion_tokens for answer in answers)
    parts = [
        f"{tokens:,} token{'s' * (tokens != 1)}" + (f" ({len(answers)} answers)" if completion.others else ""),
        f"{_tokens_per_second(completion):.1f} tok/s",
        *([f"{_tokens_per_step(answers):.1f} tok a step"] if _drafted_tokens(answers) else []),
        f"TTFT {format_latency(timings.ttft)}",
        f"prompt {usage.prompt_tokens:,} tok{_cached_note(completion)}",
    ]
    if usage.dropped_tokens:
        parts.append(f"{usage.dropped_tokens:,} tok dropped")
    if end_reason:
        parts.append(end_reason)
    return " · ".join(parts)


def statistics_lines(completion: Completion, end_reason: str, load_seconds: float, peak_memory: int) -> list[str]:
    """Return the full statistics that `--verbose` prints, a line each."""
    usage, timings = completion.usage, completion.timings
    answers = (completion, *completion.others)
    answer_tokens = sum(answer.usage.completion_tokens for answer in answers)
    thinking_tokens = sum(answer.usage.thinking_tokens for answer in answers)
    thoughts = f" ({thinking_tokens:,} of thoughts)" if thinking_tokens else ""
    rate = _tokens_per_second(completion)
    lines = {
        "load": f"{load_seconds:.2f} s",
        "prompt": (
            f"{usage.prompt_tokens:,} tokens{_cached_note(completion)}, {timings.prefill_tokens_per_second:.1f} tok/s"
        ),
        "generation": f"{answer_tokens:,} tokens{thoughts}, {rate:.1f} tok/s, {end_reason or 'ended by itself'}",
        **({"drafts": _draft_summary(answers)} if _drafted_tokens(answers) else {}),
        "first token": f"{timings.ttft:.3f} s, {timings.queued:.3f} s of it in the queue",
        "total": f"{timings.total:.2f} s",
        "peak memory": format_bytes(peak_memory),
    }
    return [f"{name + ':':<13}{value}" for name, value in lines.items()]


def format_latency(seconds: float) -> str:
    """Return a time such as `180 ms`, `12.3 s` or `3:05` minutes."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)


def _tokens_per_second(completion: Completion) -> float:
    """Return the tokens per second of all answers together, since they are decoded at the same time."""
    if not completion.others:
        return completion.timings.decode_tokens_per_second
    answers = (completion, *completion.others)
    seconds = max(answer.timings.total - answer.timings.ttft for answer in answers)
    tokens = sum(answer.usage.completion_tokens - 1 for answer in answers)
    return tokens / seconds if tokens > 0 and seconds > 0 else completion.timings.decode_tokens_per_second


def _drafted_tokens(answers: Sequence[Completion]) -> int:
    """Return how many tokens were drafted in all answers."""
    return sum(answer.usage.drafted_tokens for answer in answers)


def _draft_summary(answers: Sequence[Completion]) -> str:
    """Return how many tokens were drafted and accepted, in words."""
    accepted_tokens = sum(answer.usage.accepted_tokens for answer in answers)
    rate = _tokens_per_step(answers)
    return f"{_drafted_tokens(answers):,} tokens, {accepted_tokens:,} of them accepted, {rate:.2f} tokens a step"


def _tokens_per_step(answers: Sequence[Completion]) -> float:
    """Return how many tokens a step added to an answer, on average."""
    steps = sum(answer.usage.completion_tokens - answer.usage.accepted_tokens for answer in answers)
    return sum(answer.usage.completion_tokens for answer in answers) / max(1, steps)


def _cached_note(completion: Completion) -> str:
    """Return ` (32 cached)`, or nothing if no prompt token was cached."""
    cached = completion.usage.cached_tokens
    return f" ({cached:,} cached)" if cached else ""
