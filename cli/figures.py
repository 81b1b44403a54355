"""The statistics after an answer: one line, or all of them."""

from __future__ import annotations

from collections.abc import Sequence

from cortexmlx.cli.terminal.text import duration
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.types.request import Completion


def summary(completion: Completion, ended: str) -> str:
    """Return the line after an answer: `24 tokens · 41.2 tok/s · TTFT 180 ms · prompt 37 tok (32 cached)`. It ends with
    `ended`, the reason if the answer was cut short.
    """
    usage, timings = completion.usage, completion.timings
    answers = (completion, *completion.others)
    tokens = sum(answer.usage.completion_tokens for answer in answers)
    parts = [
        f"{tokens:,} token{'s' * (tokens != 1)}" + (f" ({len(answers)} answers)" if completion.others else ""),
        f"{_rate(completion):.1f} tok/s",
        *([f"{_per_step(answers):.1f} tok a step"] if _drafted(answers) else []),
        f"TTFT {latency(timings.ttft)}",
        f"prompt {usage.prompt_tokens:,} tok{_cached(completion)}",
    ]
    if usage.dropped_tokens:
        parts.append(f"{usage.dropped_tokens:,} tok dropped")
    if ended:
        parts.append(ended)
    return " · ".join(parts)


def figures(completion: Completion, ended: str, load_seconds: float, peak_memory: int) -> list[str]:
    """Return what `--verbose` prints, a line each."""
    usage, timings = completion.usage, completion.timings
    answers = (completion, *completion.others)
    said = sum(answer.usage.completion_tokens for answer in answers)
    thought = sum(answer.usage.thinking_tokens for answer in answers)
    thoughts = f" ({thought:,} of thoughts)" if thought else ""
    rate = _rate(completion)
    lines = {
        "load": f"{load_seconds:.2f} s",
        "prompt": f"{usage.prompt_tokens:,} tokens{_cached(completion)}, {timings.prefill_tokens_per_second:.1f} tok/s",
        "generation": f"{said:,} tokens{thoughts}, {rate:.1f} tok/s, {ended or 'ended by itself'}",
        **({"drafts": _drafts(answers)} if _drafted(answers) else {}),
        "first token": f"{timings.ttft:.3f} s, {timings.queued:.3f} s of it in the queue",
        "total": f"{timings.total:.2f} s",
        "peak memory": format_bytes(peak_memory),
    }
    return [f"{name + ':':<13}{value}" for name, value in lines.items()]


def latency(seconds: float) -> str:
    """Return a time such as `180 ms`, `12.3 s` or `3:05` minutes."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def _rate(completion: Completion) -> float:
    """Return the tokens per second of all answers together, because they are written at the same time."""
    if not completion.others:
        return completion.timings.decode_tokens_per_second
    answers = (completion, *completion.others)
    seconds = max(answer.timings.total - answer.timings.ttft for answer in answers)
    tokens = sum(answer.usage.completion_tokens - 1 for answer in answers)
    return tokens / seconds if tokens > 0 and seconds > 0 else completion.timings.decode_tokens_per_second


def _drafted(answers: Sequence[Completion]) -> int:
    return sum(answer.usage.drafted_tokens for answer in answers)


def _drafts(answers: Sequence[Completion]) -> str:
    accepted = sum(answer.usage.accepted_tokens for answer in answers)
    return f"{_drafted(answers):,} tokens, {accepted:,} of them accepted, {_per_step(answers):.2f} tokens a step"


def _per_step(answers: Sequence[Completion]) -> float:
    """Return how many tokens a step computed of an answer, on average."""
    steps = sum(answer.usage.completion_tokens - answer.usage.accepted_tokens for answer in answers)
    return sum(answer.usage.completion_tokens for answer in answers) / max(1, steps)


def _cached(completion: Completion) -> str:
    cached = completion.usage.cached_tokens
    return f" ({cached:,} cached)" if cached else ""
