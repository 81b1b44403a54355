"""Thousands of mixed requests through the engine: nothing is lost, nothing leaks, and everybody gets an answer."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.core.handle import RequestHandle
from cortexmlx.types.request import FinishReason, RequestState
from support.models.tiny import tokens_of
from support.patience import PATIENCE, soon

COMMON = tokens_of(60, seed=31)
WINDOW = 24
"""Requests in flight at once."""
WARM_UP = 1 / 3
"""The part of the requests after which memory must not grow any more."""


def prompt_of(dice: random.Random) -> list[int]:
    shared = COMMON[: dice.choice([0, 8, 30, 60])]
    return [*shared, *(dice.randrange(256) for _ in range(dice.randrange(1, 60)))]


def params_of(dice: random.Random) -> SamplingParams:
    n = dice.choice([1, 1, 1, 1, 2, 3])
    return SamplingParams(
        max_tokens=dice.choice([1, 2, 17, 40, 90]),
        temperature=dice.choice([0.0, 0.7]),
        repetition_penalty=dice.choice([1.0, 1.0, 1.1]),
        stop=dice.choice([(), (), ("e",), ("th", "x")]),
        stop_token_ids=dice.choice([(), (100,)]),
        ignore_eos=dice.random() < 0.5,
        logprobs=dice.choice([None, None, 2]),
        n=n,
        best_of=dice.choice([None, n + 1]),
        priority=dice.choice([0, 0, 0, 1]),
        seed=dice.randrange(1000),
    )


def checked_after_every_step(core: Any) -> None:
    """From now on a step after which the books disagree fails, and its requests with it."""
    step = core.step

    def checked() -> None:
        step()
        core.check_invariants()

    core.step = checked


class Soak:
    """Keeps `WINDOW` requests in flight; cancels some; looks at the books all the time."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.dice = random.Random(seed)
        self.open: list[RequestHandle] = []
        self.reasons: dict[FinishReason, int] = dict.fromkeys(FinishReason, 0)
        self.engine._worker.ask(checked_after_every_step)

    def run(self, requests: int) -> None:
        for number in range(requests):
            client = self.dice.choice([None, "one", "other"])
            self.open.append(self.engine.submit(prompt_of(self.dice), params_of(self.dice), client=client))
            if self.dice.random() < 0.1:
                self.dice.choice(self.open).cancel()
            if number % 97 == 0:
                self.engine.on_memory_pressure(self.dice.choice(["warning", "critical"]))
            while len(self.open) >= WINDOW:
                self.resolve(self.open.pop(0))
        while self.open:
            self.resolve(self.open.pop())
        self.settle()

    def resolve(self, handle: RequestHandle) -> None:
        done = handle.result(PATIENCE)
        for answer in (done, *done.others):
            self.reasons[answer.finish_reason] += 1
            assert answer.usage.completion_tokens == len(answer.token_ids)
        assert handle.state in (RequestState.FINISHED, RequestState.CANCELLED)

    def settle(self) -> None:
        """Wait until the engine is idle, then forget what is cached."""
        deadline = time.monotonic() + PATIENCE
        while not self.engine._worker.ask(lambda core: core.idle):
            stats = self.engine.stats()
            assert time.monotonic() < deadline, f"still at work: {stats.sequences}, {stats.used_blocks} blocks"
            time.sleep(0.01)
        stats = self.engine.stats()
        assert not (stats.rows_running or stats.rows_waiting or stats.used_blocks)
        self.engine.check_invariants()
        self.engine.on_memory_pressure("critical")

    def memory(self) -> int:
        return self.engine.stats().active_memory


def soak(model: Any, requests: int) -> None:
    Engine(model).close()  # mlx needs the threads that it has seen: an engine's thread waits for the next engine
    threads = threading.active_count()
    with Engine(
        model, block_size=8, kv_memory="40KB", max_rows=8, prefill_budget=64, client_tokens=250, token_target=0.05
    ) as engine:
        runs = Soak(engine, seed=requests)
        runs.run(int(requests * WARM_UP))
        warm = runs.memory()
        runs.run(requests - int(requests * WARM_UP))
        stats = engine.stats()
        print(f"{requests} requests, {stats.steps} steps, {stats.preemptions} preemptions, {runs.reasons}")
        print(f"active memory {warm} bytes after warm-up, {stats.active_memory} at the end")
        assert stats.preemptions > requests / 50, "the arena must be too small for some"
        assert all(runs.reasons[r] for r in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED))
        assert stats.requests_finished == requests
        assert stats.active_memory <= 1.02 * warm
        assert stats.cached_blocks == 0 and stats.free_blocks == stats.total_blocks
        assert engine._worker.ask(lambda core: len(core.cache.prefix)) == 0
    assert soon(lambda: threading.active_count() <= threads)  # others' threads may end meanwhile


def test_sixty_requests(tiny: Any) -> None:
    soak(tiny("one layer"), 60)


@pytest.mark.slow
def test_three_thousand_requests(tiny: Any) -> None:
    soak(tiny("one layer"), 3_000)
