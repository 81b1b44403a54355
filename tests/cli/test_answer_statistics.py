"""The figures below an answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cortexmlx.cli.answer_statistics import format_latency, statistics_line, statistics_lines
from cortexmlx.types.request import Completion, FinishReason, Timings, Usage

ANSWER = Completion("a", (1,), FinishReason.STOP, Usage(1037, 1), Timings(0.02, 0.18, 2.0, 500.0, 41.23))


def test_the_line_says_what_there_is_to_say() -> None:
    assert statistics_line(ANSWER, "") == "1 token · 41.2 tok/s · TTFT 180 ms · prompt 1,037 tok"
    more = replace(ANSWER, usage=Usage(1037, 2400, cached_tokens=1024, dropped_tokens=2000))
    assert statistics_line(more, "stopped").split(" · ") == [
        "2,400 tokens",
        "41.2 tok/s",
        "TTFT 180 ms",
        "prompt 1,037 tok (1,024 cached)",
        "2,000 tok dropped",
        "stopped",
    ]


def test_all_figures_count_the_tokens_of_all_answers() -> None:
    said = statistics_lines(replace(ANSWER, others=(ANSWER, ANSWER)), "", 1.5, 3 << 30)
    assert said[0] == "load:        1.50 s" and said[-1] == "peak memory: 3 GiB"
    assert said[2] == "generation:  3 tokens, 41.2 tok/s, ended by itself"
    thought = replace(ANSWER, usage=Usage(5, 900, thinking_tokens=700))
    said = statistics_lines(replace(thought, others=(thought,)), "stopped", 1.5, 3 << 30)
    assert said[2] == "generation:  1,800 tokens (1,400 of thoughts), 987.9 tok/s, stopped"


def test_the_line_is_of_all_answers_that_were_written_at_once() -> None:
    times = Timings(0.0, 1.0, 11.0, 500.0, 9.9)
    three = [replace(ANSWER, usage=Usage(20, tokens), timings=times) for tokens in (101, 51, 51)]
    line = statistics_line(replace(three[0], others=tuple(three[1:])), "")
    assert line == "203 tokens (3 answers) · 20.0 tok/s · TTFT 1.0 s · prompt 20 tok"


def test_what_was_drafted_is_said_if_anything_was() -> None:
    drafted = replace(ANSWER, usage=Usage(20, 90, drafted_tokens=80, accepted_tokens=60))
    assert statistics_line(drafted, "").split(" · ")[1:3] == ["41.2 tok/s", "3.0 tok a step"]
    wrong = replace(ANSWER, usage=Usage(20, 60, drafted_tokens=9))
    assert statistics_line(wrong, "").split(" · ")[2] == "1.0 tok a step"
    said = statistics_lines(replace(drafted, others=(wrong,)), "", 1.5, 3 << 30)
    assert said[3] == "drafts:      89 tokens, 60 of them accepted, 1.67 tokens a step"
    assert not any("draft" in line for line in statistics_lines(ANSWER, "", 1.5, 3 << 30))


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.0124, "12 ms"), (3.21, "3.2 s"), (101.281, "1:41"), (7200, "2:00:00")]
)
def test_a_latency_is_in_the_unit_that_people_use(seconds: float, said: str) -> None:
    assert format_latency(seconds) == said
