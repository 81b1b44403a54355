"""Which steps run ahead of the one in flight, and why the others do not."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.scheduling.decode_window import DrainReason
from cortexmlx.scheduling.keep_policy import KeepPolicy
from cortexmlx.scheduling.plan import StepKind, StepPlan
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.types.sampling_params import SamplingParams
from support.scheduling.clockwork import LAYER
from support.scheduling.requests import add, commit


class Pipeline:
    """A scheduler whose steps are planned one ahead, as an engine plans them. `reasons` has one for each step."""

    def __init__(self, blocks: int = 64, max_rows: int = 4, **options: Any) -> None:
        config = SchedulerConfig(max_rows=max_rows, prefill_budget=64, context_length=1 << 20, **options)
        self.scheduler = Scheduler(KVCache(BlockPools([LAYER], blocks, 4)), config)
        self.in_flight: list[StepPlan] = []
        self.reasons: list[DrainReason | None] = []

    def add(self, number: int, prompt: int, tokens: int, **params: Any) -> None:
        asked = SamplingParams(max_tokens=tokens, ignore_eos=True, **params)
        add(self.scheduler, number, [number + 1] * prompt, asked)

    def step(self) -> None:
        before, flying = self.scheduler.pipeline_gate.steps.copy(), len(self.in_flight)
        plan = self.scheduler.plan(flying)
        counted = self.scheduler.pipeline_gate.steps - before
        if plan is not None:
            (reason,) = counted.elements()
            assert not flying or reason is None, "a step ran ahead though there is a reason against it"
            wrote = plan.kind is not StepKind.DECODE or plan.flush is not None or plan.copies or plan.loads
            assert not wrote or (reason is not None and reason.ends_window), "a step that writes the arena ran ahead"
            self.reasons.append(reason)
            self.in_flight.append(plan)
        else:
            assert not counted, "a step was counted that was not planned"
        if self.in_flight and (plan is None or len(self.in_flight) > 1):
            done = self.in_flight.pop(0)
            commit(self.scheduler, done, [9] * len(done.logit_segments))

    def finish(self) -> list[DrainReason | None]:
        for _ in range(10_000):
            if self.scheduler.is_idle and not self.in_flight:
                assert (
                    sum(self.scheduler.pipeline_gate.steps.values())
                    == self.scheduler.planned_steps
                    == len(self.reasons)
                )
                return self.reasons
            self.step()
        raise AssertionError("it never comes to an end")


def test_a_prompt_is_awaited_and_the_tokens_behind_it_run_ahead() -> None:
    pipeline = Pipeline()
    pipeline.add(0, 9, 12)
    assert pipeline.finish() == [DrainReason.ADMISSION, *[None] * 11, DrainReason.FLUSH]


def test_a_prompt_of_several_pieces_and_a_full_window() -> None:
    pipeline = Pipeline(blocks=256)
    pipeline.add(0, 150, 40)
    reasons = pipeline.finish()
    assert reasons[:3] == [DrainReason.ADMISSION, DrainReason.PROMPT, DrainReason.PROMPT]
    assert reasons[3:] == [
        *[None] * 16,
        DrainReason.FLUSH,
        *[None] * 15,
        DrainReason.FLUSH,
        *[None] * 6,
        DrainReason.FLUSH,
    ]


@pytest.mark.parametrize("asks", [{"repetition_penalty": 1.2}, {"logits_processors": (print,)}])
def test_sampling_that_looks_back_waits_once_a_window_and_not_at_each_token(asks: Any) -> None:
    pipeline = Pipeline()
    pipeline.add(0, 9, 12, **asks)
    assert pipeline.finish() == [DrainReason.ADMISSION, DrainReason.HISTORY, *[None] * 10, DrainReason.FLUSH]


def test_without_a_pipeline_no_step_runs_ahead_and_windows_stay_open() -> None:
    pipeline = Pipeline(pipeline=False)
    pipeline.add(0, 9, 12)
    assert pipeline.finish() == [DrainReason.ADMISSION, *[DrainReason.UNPIPELINED] * 11, DrainReason.FLUSH]


def test_who_waits_for_the_memory_of_one_that_has_ended_gets_it_by_a_flush() -> None:
    """One of eight rows has ended, too few for a flush that only saves its lane."""
    pipeline = Pipeline(blocks=64, max_rows=9, headroom=0)
    for number in range(8):
        pipeline.add(number, 8, 13 if number else 12)
    pipeline.add(8, 200, 3)
    assert DrainReason.MEMORY in pipeline.finish()


def test_a_row_that_lets_go_of_tokens_says_so() -> None:
    pipeline = Pipeline(keep=KeepPolicy(2, 8))
    pipeline.add(0, 4, 60)
    assert DrainReason.DROP in pipeline.finish()
