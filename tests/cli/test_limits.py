"""The line below an answer says the right reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cortexmlx.cli.limits import ending
from cortexmlx.request import Completion, FinishReason, Timings, Usage
from cortexmlx.sampling_params import SamplingParams
from cortexmlx.serving.config import EngineConfig
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
