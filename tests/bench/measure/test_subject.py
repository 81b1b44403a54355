"""Requests through the engine as its callers send them, beside mlx-lm doing the same."""

from __future__ import annotations

from cortexmlx import Engine
from cortexmlx.bench.measure.mlxlm import MlxLmContestant
from cortexmlx.bench.measure.prompts import PromptStream
from cortexmlx.bench.measure.subject import CortexContestant
from cortexmlx.bench.measure.trace import BenchRequest


def test_a_late_request_arrives_when_the_first_has_its_tokens(engine: Engine) -> None:
    prompts = PromptStream(512, 1)
    work = [BenchRequest(prompts.next_prompt(8), 30), BenchRequest(prompts.next_prompt(8), 4, after_tokens=10)]
    for side in (CortexContestant(engine), MlxLmContestant(engine.inspect(lambda core: core.loaded))):
        trace = side.run(work)
        first, late = trace.requests
        assert len(late.tokens) == 4
        assert late.submit_time.wall >= first.stamps[9].wall
        assert late.stamps[0].wall < first.stamps[-1].wall


def test_chat_turns_continue_the_conversation(engine: Engine) -> None:
    prompts = PromptStream(512, 2)
    turns = [BenchRequest(prompts.next_prompt(20), 6), BenchRequest(prompts.next_prompt(5), 6)]
    answers = [
        side.chat(turns).tokens
        for side in (
            CortexContestant(engine),
            MlxLmContestant(engine.inspect(lambda core: core.loaded), prompt_cache=True),
            MlxLmContestant(engine.inspect(lambda core: core.loaded), prompt_cache=False),
        )
    ]
    assert answers[0] == answers[1] == answers[2]
