"""The cases of `--suite serving`: the strengths of a paged engine. Each case says what it compares and its target."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cortexmlx.bench.measure.mlxlm import BatchSettings
from cortexmlx.bench.measure.pairs import Better, Case, Measure
from cortexmlx.bench.measure.prompts import Prompts
from cortexmlx.bench.measure.trace import Trace, Work
from cortexmlx.bench.suites.against import Contest, Section, decode, together

LONG_PROMPT = 2_000
CONTEXTS = (64, 1_024)
COMPLETIONS = (16, 512)
CHUNK = 512
"""Prompt tokens per step: the engine's default."""
DECODED = 64
"""Tokens of a decoding row. The first rows decode while the last prompts are computed, and must not end before all
decode.
"""


def serving_sections() -> list[Section]:
    """Return all serving cases."""
    return [
        Section(
            lambda contest: [
                shared_system_prompt(contest),
                second_turn(contest, prompt_cache=False, target=0.15),
                second_turn(contest, prompt_cache=True, target=1.1),
                ragged_kv_bytes(contest),
                long_prompt_arrives(contest),
                ragged_completions(contest),
            ]
        ),
        Section(
            lambda contest: [
                long_prompt_in_equal_chunks(contest),
                ragged_decode(contest),
                uniform_decode(contest),
            ],
            token_target=False,
        ),
    ]


def shared_system_prompt(contest: Contest) -> Case:
    """Sixteen questions after one system prompt. A prefix cache computes the system prompt once."""

    def work(prompts: Prompts) -> list[Work]:
        system = prompts.take(512)
        return [Work(system + prompts.take(32), 16) for _ in range(16)]

    what = "16 questions of 32 tokens behind a shared system prompt of 512 tokens, 16 tokens each"
    return contest.case("shared system prompt", what, work, [_total(0.35)], together(16), background=True)


def second_turn(contest: Contest, *, prompt_cache: bool, target: float) -> Case:
    """The second question of a chat. The conversation before it need not be computed again."""

    peer = f"mlx-lm {'with' if prompt_cache else 'without'} its prompt cache"
    name = f"second chat turn, {peer}"

    def turns(repetition: int) -> list[Work]:
        prompts = contest.prompts(name, repetition)
        return [Work(prompts.take(500), 100), Work(prompts.take(32), 2)]

    return Case(
        name,
        f"32 more tokens after a conversation of 600, against {peer}",
        lambda repetition: contest.cortex().chat(turns(repetition)),
        lambda repetition: contest.mlx_lm(prompt_cache=prompt_cache).chat(turns(repetition)),
        (_ttft(0, "TTFT", target),),
    )


def ragged_kv_bytes(contest: Contest) -> Case:
    """Sixteen contexts of very different lengths: blocks and tails, compared with a padded batch."""
    settings = BatchSettings(completion_batch_size=16, prefill_batch_size=16, watch_kv=True)
    measure = Measure("peak KV in use", "bytes", Trace.kv_peak, Better.LOWER, 0.5)
    what = "peak KV memory of 16 requests with prompts of 64 to 1,024 tokens (log-uniform), 16 tokens each"
    return contest.case("ragged KV memory", what, _ragged(16), [measure], settings)


def long_prompt_arrives(contest: Contest) -> Case:
    """A long prompt arrives while other rows decode. Both sides have their defaults."""
    return _arrival(contest, "long prompt arrives", "both with their defaults", BatchSettings(), 0.1)


def long_prompt_in_equal_chunks(contest: Contest) -> Case:
    """A long prompt arrives while other rows decode. Both sides compute prompts in chunks of one size."""
    settings = BatchSettings(prefill_step_size=CHUNK)
    return _arrival(contest, "long prompt, equal chunks", f"{CHUNK} tokens per chunk", settings, 1.1)


def _arrival(contest: Contest, name: str, how: str, settings: BatchSettings, target: float) -> Case:
    def work(prompts: Prompts) -> list[Work]:
        rows = [Work(prompts.take(64), 96) for _ in range(4)]
        return [*rows, Work(prompts.take(LONG_PROMPT), 2, after=16)]

    gap = partial(Trace.longest_gap, requests=range(4))
    measures = [
        Measure("longest gap between tokens", "s", gap, Better.LOWER, target),
        _ttft(4, "TTFT of the new prompt", 1.3),
    ]
    what = f"4 rows decode while a prompt of {LONG_PROMPT:,} tokens arrives, {how}"
    return contest.case(name, what, work, measures, settings)


def ragged_decode(contest: Contest) -> Case:
    """Sixteen rows at contexts of 64 to 1,024 tokens: nothing is padded."""
    what = "16 rows decode behind prompts of 64 to 1,024 tokens (log-uniform)"
    return contest.case("ragged decode x16", what, _ragged(DECODED), [decode(1.1)], together(16))


def uniform_decode(contest: Contest) -> Case:
    """Sixteen rows at the same long context: padding costs nothing here."""
    what = "16 rows decode behind prompts of 1,024 tokens"
    return contest.case(
        "uniform decode x16",
        what,
        lambda prompts: [Work(prompts.take(CONTEXTS[1]), DECODED) for _ in range(16)],
        [decode(1.0)],
        together(16),
    )


def ragged_completions(contest: Contest) -> Case:
    """Sixty-four requests that end at very different times share sixteen rows."""

    def work(prompts: Prompts) -> list[Work]:
        return [Work(prompts.take(32), n) for n in prompts.lengths(64, *COMPLETIONS)]

    what = "64 requests with completions of 16 to 512 tokens (log-uniform) through 16 rows"
    settings = BatchSettings(completion_batch_size=16)
    return contest.case("ragged completions", what, work, [_total(0.8)], settings, background=True)


def _ragged(generate: int) -> Callable[[Prompts], list[Work]]:
    return lambda prompts: [Work(prompts.take(n), generate) for n in prompts.lengths(16, *CONTEXTS)]


def _total(target: float) -> Measure:
    return Measure("total time", "s", Trace.total, Better.LOWER, target)


def _ttft(request: int, name: str, target: float) -> Measure:
    return Measure(name, "s", partial(Trace.ttft, request=request), Better.LOWER, target)
