"""The line below an answer says the right reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cortexmlx.cli.limits import cut_form, ending
from cortexmlx.core.config import EngineConfig
from cortexmlx.structured.output import StructuredOutput
from cortexmlx.types.request import Completion, FinishReason, Timings, Usage
from cortexmlx.types.sampling_params import SamplingParams
from support.cli.cli_fakes import FakeEngine

DONE = Completion("x", (1,), FinishReason.LENGTH, Usage(990, 10), Timings(0.0, 0.0, 0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("completion", "most", "holds", "says"),
    [
        (DONE, 10, 8192, "stopped at the token limit of 10"),
        (DONE, 11, 8192, "stopped: the context of 8,192 tokens is full"),
        (DONE, None, 8192, "stopped: the context of 8,192 tokens is full"),
        (DONE, 11, 1000, "stopped: the KV memory of 2 GiB (1,000 tokens) is full"),
        (replace(DONE, finish_reason=FinishReason.STOP), 10, 8192, ""),
        (replace(DONE, finish_reason=FinishReason.CANCELLED), 10, 8192, "stopped"),
    ],
)
def test_why_an_answer_ended(
    completion: Completion, most: int | None, holds: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = FakeEngine(EngineConfig("fake"))
    monkeypatch.setattr(FakeEngine, "longest_request", holds)
    assert ending(completion, SamplingParams(max_tokens=most), engine) == says


def test_a_form_is_whole_if_its_grammar_ended_it_or_its_text_says_so() -> None:
    """A stop text may end an answer anywhere, and a limit may come with its last token."""
    json, choice, regex = StructuredOutput.json(), StructuredOutput.choice(["a b", "a"]), StructuredOutput.regex("a+")
    length, stop = FinishReason.LENGTH, FinishReason.STOP
    for form, text, reason, stopped_by, whole in (
        (json, "{", stop, None, True),
        (json, '{"a": 1', stop, "}", False),
        (json, '{"a": 1}', stop, "\n", True),
        (json, '{"a": 1}', length, None, True),
        (json, "[" * 100_000, length, None, False),
        (choice, "a", length, None, True),
        (choice, "a ", length, None, False),
        (regex, "a", length, None, False),
        (json, "{", FinishReason.TOOL_CALLS, None, True),
    ):
        answer = replace(DONE, text=text, finish_reason=reason, stop_string=stopped_by)
        assert bool(cut_form(answer, SamplingParams(structured=form))) is not whole
        assert not cut_form(answer, SamplingParams())
