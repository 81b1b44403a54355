"""Prompts for benchmarks: unique, repeatable, and of lengths that spread."""

from __future__ import annotations

from cortexmlx.bench.measure.prompts import PromptStream


def test_prompts_never_repeat_and_a_seed_gives_the_same_ones_again() -> None:
    stream, again, other = PromptStream(5_000, 1), PromptStream(5_000, 1), PromptStream(5_000, 2)
    taken = [stream.next_prompt(16) for _ in range(50)]
    assert len(set(taken)) == 50
    assert taken == [again.next_prompt(16) for _ in range(50)]
    assert other.next_prompt(16) not in taken
    assert all(0 <= token < 5_000 for prompt in taken for token in prompt)


def test_lengths_spread_over_the_whole_range_and_reach_its_end() -> None:
    lengths = PromptStream(100, 0).draw_lengths(400, 64, 1024)
    assert min(lengths) >= 64
    assert max(lengths) == 1024
    short = sum(length < 256 for length in lengths)  # log-uniform: half of them are below the geometric mean
    assert 150 < short < 250
