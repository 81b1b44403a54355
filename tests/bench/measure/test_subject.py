"""Requests through the engine as its callers send them, beside mlx-lm doing the same."""

from __future__ import annotations

from cortexmlx import Engine
from cortexmlx.bench.measure.mlxlm import MlxLm
from cortexmlx.bench.measure.prompts import Prompts
from cortexmlx.bench.measure.subject import Cortex
from cortexmlx.bench.measure.trace import Work


def test_a_late_request_arrives_when_the_first_has_its_tokens(engine: Engine) -> None:
    prompts = Prompts(512, 1)
    work = [Work(prompts.take(8), 30), Work(prompts.take(8), 4, after=10)]
    for side in (Cortex(engine), MlxLm(engine.inspect(lambda core: core.loaded))):
        trace = side.run(work)
        first, late = trace.requests
        assert len(late.tokens) == 4
        assert late.submitted.wall >= first.stamps[9].wall
        assert late.stamps[0].wall < first.stamps[-1].wall


def test_chat_turns_continue_the_conversation(engine: Engine) -> None:
    prompts = Prompts(512, 2)
    turns = [Work(prompts.take(20), 6), Work(prompts.take(5), 6)]
    answers = [
        side.chat(turns).tokens
        for side in (
            Cortex(engine),
            MlxLm(engine.inspect(lambda core: core.loaded), prompt_cache=True),
            MlxLm(engine.inspect(lambda core: core.loaded), prompt_cache=False),
        )
    ]
    assert answers[0] == answers[1] == answers[2]
