"""The cases of `--suite serving`: the strengths of a paged engine. Each case says what it compares and its target."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cortexmlx.bench.measure.mlxlm import BatchSettings
from cortexmlx.bench.measure.pairs import BetterDirection, ComparisonCase, Measure
from cortexmlx.bench.measure.prompts import PromptStream
from cortexmlx.bench.measure.trace import BenchRequest, RunTrace
from cortexmlx.bench.suites.against import CaseSection, Contest, decode_measure, simultaneous_settings

LONG_PROMPT = 2_000
CONTEXTS = (64, 1_024)
COMPLETIONS = (16, 512)
CHUNK = 512
"""Prompt tokens per step: the engine's default."""
DECODED = 64
"""Tokens of a decoding row. The first rows decode while the last prompts are computed, and must not end before all
decode.
"""


def serving_sections() -> list[CaseSection]:
    """Return all serving cases, in sections that share an engine."""
    return [
        CaseSection(
            lambda contest: [
                shared_system_prompt(contest),
                second_turn(contest, prompt_cache=False, target=0.15),
                second_turn(contest, prompt_cache=True, target=1.1),
                ragged_kv_bytes(contest),
                long_prompt_arrives(contest),
                ragged_completions(contest),
            ]
        ),
        CaseSection(
            lambda contest: [
                long_prompt_in_equal_chunks(contest),
                ragged_decode(contest),
                uniform_decode(contest),
            ],
            token_target=False,
        ),
    ]


def shared_system_prompt(contest: Contest) -> ComparisonCase:
    """Return a case: sixteen questions after one system prompt, which a prefix cache computes once."""

    def work(prompts: PromptStream) -> list[BenchRequest]:
        system = prompts.next_prompt(512)
        return [BenchRequest(system + prompts.next_prompt(32), 16) for _ in range(16)]

    description = "16 questions of 32 tokens behind a shared system prompt of 512 tokens, 16 tokens each"
    return contest.make_case(
        "shared system prompt", description, work, [_total_measure(0.35)], simultaneous_settings(16), background=True
    )


def second_turn(contest: Contest, *, prompt_cache: bool, target: float) -> ComparisonCase:
    """Return a case: the second question of a chat, for which the first turn may be cached."""

    peer = f"mlx-lm {'with' if prompt_cache else 'without'} its prompt cache"
    name = f"second chat turn, {peer}"

    def make_turns(repetition: int) -> list[BenchRequest]:
        prompts = contest.make_prompts(name, repetition)
        return [BenchRequest(prompts.next_prompt(500), 100), BenchRequest(prompts.next_prompt(32), 2)]

    return ComparisonCase(
        name,
        f"32 more tokens after a conversation of 600, against {peer}",
        lambda repetition: contest.make_cortex().chat(make_turns(repetition)),
        lambda repetition: contest.make_mlx_lm(prompt_cache=prompt_cache).chat(make_turns(repetition)),
        (_ttft_measure(0, "TTFT", target),),
    )


def ragged_kv_bytes(contest: Contest) -> ComparisonCase:
    """Return a case: the KV memory of sixteen contexts of very different lengths, in blocks or in a padded batch."""
    settings = BatchSettings(completion_batch_size=16, prefill_batch_size=16, watch_kv=True)
    measure = Measure("peak KV in use", "bytes", RunTrace.kv_peak, BetterDirection.LOWER, 0.5)
    description = "peak KV memory of 16 requests with prompts of 64 to 1,024 tokens (log-uniform), 16 tokens each"
    return contest.make_case("ragged KV memory", description, _ragged_requests(16), [measure], settings)


def long_prompt_arrives(contest: Contest) -> ComparisonCase:
    """Return a case: a long prompt arrives while other rows decode. Both sides have their defaults."""
    return _late_prompt_case(contest, "long prompt arrives", "both with their defaults", BatchSettings(), 0.1)


def long_prompt_in_equal_chunks(contest: Contest) -> ComparisonCase:
    """Return a case: a long prompt arrives while other rows decode. Both sides compute prompts in equal chunks."""
    settings = BatchSettings(prefill_step_size=CHUNK)
    return _late_prompt_case(contest, "long prompt, equal chunks", f"{CHUNK} tokens per chunk", settings, 1.1)


def _late_prompt_case(
    contest: Contest, name: str, settings_note: str, settings: BatchSettings, target: float
) -> ComparisonCase:
    """Return a case in which a long prompt arrives while four rows decode."""

    def work(prompts: PromptStream) -> list[BenchRequest]:
        rows = [BenchRequest(prompts.next_prompt(64), 96) for _ in range(4)]
        return [*rows, BenchRequest(prompts.next_prompt(LONG_PROMPT), 2, after_tokens=16)]

    gap = partial(RunTrace.longest_gap, requests=range(4))
    measures = [
        Measure("longest gap between tokens", "s", gap, BetterDirection.LOWER, target),
        _ttft_measure(4, "TTFT of the new prompt", 1.3),
    ]
    description = f"4 rows decode while a prompt of {LONG_PROMPT:,} tokens arrives, {settings_note}"
    return contest.make_case(name, description, work, measures, settings)


def ragged_decode(contest: Contest) -> ComparisonCase:
    """Return a case: sixteen rows decode at contexts of 64 to 1,024 tokens, and nothing is padded."""
    description = "16 rows decode behind prompts of 64 to 1,024 tokens (log-uniform)"
    return contest.make_case(
        "ragged decode x16", description, _ragged_requests(DECODED), [decode_measure(1.1)], simultaneous_settings(16)
    )


def uniform_decode(contest: Contest) -> ComparisonCase:
    """Return a case: sixteen rows decode at the same long context, where padding costs nothing."""
    description = "16 rows decode behind prompts of 1,024 tokens"
    return contest.make_case(
        "uniform decode x16",
        description,
        lambda prompts: [BenchRequest(prompts.next_prompt(CONTEXTS[1]), DECODED) for _ in range(16)],
        [decode_measure(1.0)],
        simultaneous_settings(16),
    )


def ragged_completions(contest: Contest) -> ComparisonCase:
    """Return a case: sixty-four requests that end at very different times share sixteen rows."""

    def work(prompts: PromptStream) -> list[BenchRequest]:
        return [BenchRequest(prompts.next_prompt(32), n) for n in prompts.draw_lengths(64, *COMPLETIONS)]

    description = "64 requests with completions of 16 to 512 tokens (log-uniform) through 16 rows"
    settings = BatchSettings(completion_batch_size=16)
    return contest.make_case("ragged completions", description, work, [_total_measure(0.8)], settings, background=True)


def _ragged_requests(generate: int) -> Callable[[PromptStream], list[BenchRequest]]:
    """Return a function that makes sixteen requests with prompts of very different lengths."""
    return lambda prompts: [BenchRequest(prompts.next_prompt(n), generate) for n in prompts.draw_lengths(16, *CONTEXTS)]


def _total_measure(target: float) -> Measure:
    return Measure("total time", "s", RunTrace.total_seconds, BetterDirection.LOWER, target)


def _ttft_measure(request: int, name: str, target: float) -> Measure:
    return Measure(name, "s", partial(RunTrace.ttft, request=request), BetterDirection.LOWER, target)
