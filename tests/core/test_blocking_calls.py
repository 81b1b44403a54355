"""Engines that are opened for asyncio: the event loop goes on, and nobody is left open."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest

from cortexmlx import Engine, EngineClosed, ModelNotFound
from cortexmlx.core.blocking_calls import AsyncOpening, run_on_thread
from support.engine.asked import PROMPT, SHORT
from support.patience import PATIENCE


class Thing:
    """Something that takes its time to open and to close."""

    def __init__(self, may_open: threading.Event | None = None) -> None:
        if may_open is not None:
            may_open.wait(PATIENCE)
        self.opened_by = threading.current_thread()
        self.closed_by: threading.Thread | None = None
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed_by = threading.current_thread()
        self.closed.set()


async def turns(until: Callable[[], bool]) -> int:
    """How often the event loop comes round until something is true."""
    count = 0
    while not until():
        count += 1
        await asyncio.sleep(0.001)
    return count


def test_who_holds_up_the_event_loop_is_told_once(tiny: Any, recwarn: pytest.WarningsRecorder) -> None:
    async def program(engine: Engine) -> None:
        for _ in range(2):
            engine.generate(PROMPT, SHORT)

    with Engine(tiny("llama"), kv_memory="256KB", block_size=8) as engine:
        engine.generate(PROMPT, SHORT)
        outside = [str(each.message) for each in recwarn.list]
        asyncio.run(program(engine))
    (warned,) = (each for each in recwarn.list if "await engine.agenerate" in str(each.message))
    assert warned.filename == __file__ and not any("await engine.agenerate" in text for text in outside)


def test_an_engine_is_awaited_and_closed(tiny: Any) -> None:
    async def program() -> None:
        engine = await Engine.open(tiny("llama"), kv_memory="256KB", block_size=8)
        assert len((await engine.agenerate(PROMPT, SHORT)).token_ids) == 12
        await engine.aclose()
        with pytest.raises(EngineClosed):
            await engine.agenerate(PROMPT, SHORT)

    asyncio.run(program())


def test_an_engine_in_a_with_is_closed_at_its_end(tiny: Any) -> None:
    async def program() -> None:
        async with Engine.open(tiny("llama"), kv_memory="256KB", block_size=8) as engine:
            assert engine.stats().block_size == 8
        with pytest.raises(EngineClosed):
            engine.stats()

    asyncio.run(program())


def test_what_cannot_be_opened_raises_where_it_is_awaited() -> None:
    async def program() -> None:
        with pytest.raises(ModelNotFound, match="no model"):
            await Engine.open("there is none such")
        with pytest.raises(ModelNotFound):
            async with Engine.open("there is none such"):
                raise AssertionError("it was opened")

    asyncio.run(program())


def test_open_takes_what_the_constructor_takes() -> None:
    assert inspect.signature(Engine.open) == inspect.signature(Engine)
    with pytest.raises(TypeError, match="kv_memroy"):
        asyncio.run(run_on_thread(lambda: Engine("smollm2", kv_memroy="1GB")))  # type: ignore[call-arg]


def test_the_event_loop_goes_on_meanwhile() -> None:
    may_open = threading.Event()

    async def program() -> Thing:
        opening = asyncio.ensure_future(AsyncOpening(lambda: Thing(may_open)).__aenter__())
        await turns(lambda: False if (rounds := next(counter)) < 20 else rounds == 20)
        assert not opening.done()
        may_open.set()
        return await opening

    counter = iter(range(1000))
    assert asyncio.run(program()).opened_by is not threading.main_thread()


def test_the_end_of_a_with_closes_on_another_thread() -> None:
    async def program() -> Thing:
        async with AsyncOpening(Thing) as thing:
            assert thing.closed_by is None
        return thing

    thing = asyncio.run(program())
    assert thing.closed_by not in (None, threading.main_thread())


def test_who_is_cancelled_does_not_wait_and_what_opens_then_is_closed() -> None:
    may_open, made = threading.Event(), []

    def make() -> Thing:
        made.append(Thing(may_open))
        return made[-1]

    async def program() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaited(AsyncOpening(make)), 0.01)
        assert not made
        may_open.set()
        await turns(lambda: bool(made) and made[0].closed.is_set())

    asyncio.run(program())


def test_what_opens_after_the_event_loop_has_ended_is_closed() -> None:
    may_open, made, opened = threading.Event(), [], threading.Event()

    def make() -> Thing:
        made.append(Thing(may_open))
        opened.set()
        return made[-1]

    async def program() -> None:
        task = asyncio.ensure_future(_awaited(AsyncOpening(make)))
        await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(program())
    may_open.set()
    assert opened.wait(PATIENCE) and made[0].closed.wait(PATIENCE)


def test_what_was_opened_just_as_its_task_was_cancelled_is_closed() -> None:
    things = [Thing()]

    async def program() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(_awaited(AsyncOpening(lambda: things[0])))
        while not task.done():  # cancelled in the same turn in which the result came
            loop.call_soon(lambda: task.cancel() if _has_result(task) else None)
            await asyncio.sleep(0)
        assert task.cancelled()

    asyncio.run(program())
    assert things[0].closed.wait(PATIENCE)


def _has_result(task: asyncio.Task[Any]) -> bool:
    """What the task waits for is there, and the task has not been told yet."""
    waits_for = getattr(task, "_fut_waiter", None)
    return waits_for is not None and waits_for.done()


async def _awaited(opening: AsyncOpening[Thing]) -> Thing:
    return await opening
