"""The figures below an answer."""

from __future__ import annotations

from dataclasses import replace

from cortexmlx.cli.figures import figures, summary
from cortexmlx.request import Completion, FinishReason, Timings, Usage

ANSWER = Completion("a", (1,), FinishReason.STOP, Usage(1037, 1), Timings(0.02, 0.18, 2.0, 500.0, 41.23))


def test_the_line_says_what_there_is_to_say() -> None:
    assert summary(ANSWER, "") == "1 token · 41.2 tok/s · TTFT 180 ms · prompt 1,037 tok"
    more = replace(ANSWER, usage=Usage(1037, 2400, cached_tokens=1024, dropped_tokens=2000))
    assert summary(more, "stopped").split(" · ") == [
        "2,400 tokens",
        "41.2 tok/s",
        "TTFT 180 ms",
        "prompt 1,037 tok (1,024 cached)",
        "2,000 tok dropped",
        "stopped",
    ]


def test_all_figures_count_the_tokens_of_all_answers() -> None:
    said = figures(replace(ANSWER, others=(ANSWER, ANSWER)), "", 1.5, 3 << 30)
    assert said[0] == "load:        1.50 s" and said[-1] == "peak memory: 3 GiB"
    assert said[2] == "generation:  3 tokens, 41.2 tok/s, ended by itself"
    thought = replace(ANSWER, usage=Usage(5, 900, thinking_tokens=700))
    said = figures(replace(thought, others=(thought,)), "stopped", 1.5, 3 << 30)
    assert said[2] == "generation:  1,800 tokens (1,400 of thoughts), 41.2 tok/s, stopped"
