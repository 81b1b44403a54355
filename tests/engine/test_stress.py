"""Sixteen threads and sixteen asyncio tasks ask, stream, cancel and close at random: everybody hears the end of what he
asked, every answer has the tokens that it has alone, and in the end no thread, row or block is left.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx import Completion, CortexError, Engine, EngineClosed, RequestTimeout, SamplingParams, TokenEvent
from cortexmlx.core.handle import RequestHandle
from cortexmlx.types.request import FinishReason
from support.engine.core_driver import finally_nothing_lost
from support.models.tiny import tokens_of
from support.patience import soon

THREADS = TASKS = 16
SETTINGS: dict[str, Any] = {"kv_memory": "40KB", "block_size": 8, "max_rows": 6, "prefill_budget": 32}
PROMPTS = [tokens_of(n, seed=n) for n in (3, 9, 17, 40, 64)]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
"""Looks, 10 ms apart, until it is a deadlock. Who looks stands still when the process does."""
MOVES = 0.02
"""How often who may close the engine does."""


class Heard:
    """Everything that somebody was told of one request."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.events: list[TokenEvent] = []
        self.over = threading.Event()

    def __call__(self, event: TokenEvent) -> None:
        self.events.append(event)
        if event.completion is not None or event.error is not None:
            self.over.set()


class House:
    """An engine that anybody may close, and then opens another; and what was heard of all of them."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.engine = Engine(model, **SETTINGS)
        self.wanted = [self.engine.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]
        self.heard: list[Heard] = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[BaseException] = []
        self._moving = threading.Lock()
        self._amoving = asyncio.Lock()

    def move(self) -> None:
        with self._moving:
            self.engine.close()
            self.counts["moved"] += 1
            self.engine = Engine(self.model, **SETTINGS)

    async def amove(self) -> None:
        async with self._amoving:
            if not self._moving.acquire(blocking=False):
                return
            try:
                await self.engine.aclose()
                self.counts["moved"] += 1
                self.engine = await Engine.open(self.model, **SETTINGS)
            finally:
                self._moving.release()

    def submit(self, number: int, how: str, **options: Any) -> RequestHandle:
        """Ask with an `on_event` or a `listener`; only who is not refused has an end to hear of."""
        heard = Heard(number)
        handle = self.engine.submit(PROMPTS[number], GREEDY, **options, **{how: heard})
        self.heard.append(heard)
        return handle

    def check(self, prompt: int, events: Iterable[TokenEvent], done: Completion | None = None) -> None:
        """The tokens are those that the prompt's answer begins with, and of a whole answer all are there."""
        listed = list(events)
        tokens = tuple(e.token_id for e in listed if e.token_id is not None)
        last = done or next((e.completion for e in listed if e.completion is not None), None)
        if last is None:
            assert tokens == self.wanted[prompt][: len(tokens)]
            return
        self.counts[last.finish_reason.value] += 1
        assert last.token_ids == self.wanted[prompt][: len(last.token_ids)], "other tokens than alone"
        if last.finish_reason is not FinishReason.CANCELLED:
            assert len(last.token_ids) == GREEDY.max_tokens
        if listed:
            assert tokens == last.token_ids and "".join(e.text for e in listed) == last.text, "an event was lost"

    # -- what threads do ----------------------------------------------------------------------------------------------

    def turn(self, dice: random.Random) -> None:
        number = dice.randrange(len(PROMPTS))
        prompt, engine = PROMPTS[number], self.engine
        way = dice.randrange(10)
        if way == 0:
            self.check(number, (), engine.generate(prompt, GREEDY))
        elif way == 1:
            self.check(number, engine.stream(prompt, GREEDY))
        elif way == 2:
            with engine.stream(prompt, GREEDY) as stream:
                self.check(number, (event for event, _ in zip(stream, range(dice.randrange(9)), strict=False)))
        elif way == 3:
            handle = self.submit(number, "on_event", client=dice.choice([None, "one"]))
            time.sleep(dice.random() * 0.01)
            handle.cancel()
            self.check(number, (), handle.result())
        elif way == 4:
            self.submit(number, "listener", background=True)
        elif way == 5:
            completed = engine.as_completed(PROMPTS, GREEDY)
            for index, result in completed:
                if isinstance(result, Completion):
                    self.check(index, (), result)
                if dice.random() < 0.3:
                    completed.close()
        elif way == 6:
            with suppress(RequestTimeout):
                self.check(number, (), engine.generate(prompt, GREEDY, timeout=dice.random() * 0.05 + 0.001))
        elif way == 7:
            talk = engine.conversation(params=GREEDY)
            with talk.stream("a question") as reply:
                next(reply)
                reply.cancel() if dice.random() < 0.5 else reply.close()
        elif way == 8:
            assert engine.stats().max_rows == SETTINGS["max_rows"]
            engine.on_memory_pressure(dice.choice(["warning", "critical"]))
            engine.check_invariants()
        elif dice.random() < MOVES:
            self.move()

    # -- what tasks do ------------------------------------------------------------------------------------------------

    async def aturn(self, dice: random.Random) -> None:
        number = dice.randrange(len(PROMPTS))
        prompt, engine = PROMPTS[number], self.engine
        way = dice.randrange(6)
        if way == 0:
            self.check(number, (), await engine.agenerate(prompt, GREEDY))
        elif way == 1:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(engine.agenerate(prompt, GREEDY), dice.random() * 0.05)
        elif way == 2:
            self.check(number, [event async for event in engine.astream(prompt, GREEDY)])
        elif way == 3:
            events: list[TokenEvent] = []
            async for event in engine.astream(prompt, GREEDY):
                events.append(event)
                if dice.random() < 0.1:
                    break
            self.check(number, events)
        elif way == 4:
            stream = engine.astream(prompt, GREEDY)
            with suppress(StopAsyncIteration):
                await anext(stream)
            await stream.aclose()
        elif dice.random() < MOVES:
            await self.amove()
        else:
            await asyncio.sleep(dice.random() * 0.01)

    def tolerate(self, error: Exception) -> None:
        """An engine that was closed under its callers says so; everything else is wrong."""
        if isinstance(error, EngineClosed):
            self.counts["closed"] += 1
        else:
            self.wrong.append(error)


def at_random(house: House, seconds: float) -> None:
    until = time.monotonic() + seconds

    def work(seed: int) -> None:
        dice = random.Random(seed)
        while time.monotonic() < until and not house.wrong:
            try:
                house.turn(dice)
            except (CortexError, AssertionError) as error:
                house.tolerate(error)
                time.sleep(0.02)
            house.counts["turns"] += 1

    async def task(seed: int) -> None:
        dice = random.Random(seed)
        while time.monotonic() < until and not house.wrong:
            try:
                await house.aturn(dice)
            except (CortexError, AssertionError) as error:
                house.tolerate(error)
                await asyncio.sleep(0.02)
            house.counts["turns"] += 1

    async def tasks() -> None:
        await asyncio.gather(*(task(1000 + seed) for seed in range(TASKS)))

    workers: list[Callable[[], Any]] = [lambda seed=seed: work(seed) for seed in range(THREADS)]
    threads = [threading.Thread(target=worker, daemon=True) for worker in [*workers, lambda: asyncio.run(tasks())]]
    for thread in threads:
        thread.start()
    while time.monotonic() < until:
        time.sleep(0.1)
    if not soon(lambda: not any(thread.is_alive() for thread in threads)):
        faulthandler.dump_traceback(sys.__stderr__)
        pytest.fail("somebody waits for ever: all threads are above")


def stress(model: Path, seconds: float) -> None:
    Engine(model).close()  # the engine's thread waits for the next engine, and mlx for its own
    gc.collect()
    threads, memory = set(threading.enumerate()), mx.get_active_memory()
    house = House(model)
    at_random(house, seconds)
    for error in house.wrong:
        raise error
    for heard in house.heard:
        assert soon(heard.over.is_set), "somebody was never told of the end"
        assert sum(e.completion is not None or e.error is not None for e in heard.events) == 1
        if heard.events[-1].error is None:
            house.check(heard.prompt, heard.events)
        else:
            assert isinstance(heard.events[-1].error, EngineClosed)
    print(f"{seconds} s: {dict(house.counts)}, {len(house.heard)} listeners")
    finally_nothing_lost(house.engine)
    house.engine.check_invariants()
    house.engine.close()
    del house
    assert soon(lambda: [t for t in threading.enumerate() if t not in threads and not _parked(t)] == [])
    assert soon(lambda: gc.collect() >= 0 and mx.get_active_memory() <= memory + 4096)


def _parked(thread: threading.Thread) -> bool:
    """The thread of an engine that is gone, which waits for the next: engines that overlap need one each."""
    from cortexmlx.core import threads

    return thread in threads._parked


def test_a_second(tiny: Any) -> None:
    stress(tiny("one layer"), 1)


@pytest.mark.slow
def test_a_minute(tiny: Any) -> None:
    stress(tiny("one layer"), 60)
