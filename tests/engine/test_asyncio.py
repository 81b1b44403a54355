"""An engine's answers in asyncio."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from cortexmlx import ChatPrompt, Engine, EngineClosed, InvalidRequest, SamplingParams
from cortexmlx.core.prompt import _QUICK
from support.engine.asked import LONG, PROMPT, SHORT
from support.engine.core_driver import finally_nothing_lost
from support.engine.held import hold_long_answers
from support.models.tiny import tokens_of
from support.patience import PATIENCE


def test_agenerate_gives_what_generate_gives(engine: Engine) -> None:
    async def both() -> Any:
        return await asyncio.gather(*(engine.agenerate(tokens_of(n, seed=n), SHORT) for n in (9, 20, 31)))

    wanted = [engine.generate(tokens_of(n, seed=n), SHORT).token_ids for n in (9, 20, 31)]
    assert [answer.token_ids for answer in asyncio.run(both())] == wanted


def test_agenerate_raises_what_generate_raises(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        asyncio.run(engine.agenerate([]))
    with pytest.raises(InvalidRequest, match="temperature"):
        asyncio.run(engine.agenerate(PROMPT, SamplingParams(temperature=-1)))

    async def fail() -> None:
        task = asyncio.ensure_future(engine.agenerate(PROMPT, LONG))
        while not engine.stats().generated_tokens:
            await asyncio.sleep(0.001)
        await engine.aclose()
        with pytest.raises(EngineClosed, match="before the request could finish"):
            await task

    hold_long_answers(engine)
    asyncio.run(fail())


@pytest.mark.parametrize("streams", [False, True])
def test_a_cancelled_task_cancels_its_request(engine: Engine, streams: bool) -> None:
    async def collect() -> list[Any]:
        return [event async for event in engine.astream(PROMPT, LONG)]

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(collect() if streams else engine.agenerate(PROMPT, LONG), 0.05)

    hold_long_answers(engine)
    asyncio.run(give_up())
    finally_nothing_lost(engine)


def test_the_event_loop_wakes_once_for_a_whole_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def count() -> int:
        loop, woken = asyncio.get_running_loop(), []
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *call: woken.append(loop.call_soon(*call)))
        task = asyncio.ensure_future(engine.agenerate(PROMPT, SHORT))
        while not task.done():
            await asyncio.sleep(0.001)
        return len(woken)

    assert asyncio.run(count()) == 1


@pytest.mark.parametrize("kind", ["text", "messages", "chat"])
def test_long_texts_and_all_messages_are_read_on_another_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    cut_by: list[threading.Thread] = []

    def encode(*_: Any) -> list[int]:
        cut_by.append(threading.current_thread())
        return [1, 2, 3]

    monkeypatch.setattr(engine._tokenizer, "encode", encode)

    def prompt(size: int) -> Any:
        messages = [{"role": "user", "content": "x" * size}]
        return {"text": "x" * size, "messages": messages, "chat": ChatPrompt(messages)}[kind]

    assert asyncio.run(engine.agenerate(prompt(_QUICK), SHORT)).token_ids
    assert asyncio.run(engine.agenerate(prompt(10), SHORT)).token_ids
    main = threading.main_thread()
    assert [thread is main for thread in cut_by] == [False, kind == "text"]


def held_thread(engine: Engine) -> threading.Event:
    """What lets the engine's thread go on, which is held from now on."""
    begun, goes_on = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        begun.set()
        goes_on.wait(PATIENCE)

    threading.Thread(target=engine.inspect, args=(hold,)).start()
    assert begun.wait(PATIENCE)
    return goes_on


def test_the_event_loop_goes_on_while_the_engine_is_behind(engine: Engine) -> None:
    """Its thread is held for a while; more ask than may wait in its queue."""
    held = held_thread(engine)

    async def ask() -> list[Any]:
        one = SamplingParams(max_tokens=1)
        tasks = [asyncio.ensure_future(engine.agenerate([1, 2, 3], one)) for _ in range(100)]
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert engine._worker.would_wait
        held.set()
        return await asyncio.gather(*tasks)

    assert len({answer.token_ids for answer in asyncio.run(ask())}) == 1


def test_a_stream_that_is_closed_while_it_begins_asks_for_nothing_more(engine: Engine) -> None:
    held = held_thread(engine)

    async def leave() -> None:
        waiting = [asyncio.ensure_future(engine.agenerate([1, 2, 3], SHORT)) for _ in range(64)]
        stream = engine.astream(PROMPT, LONG)
        first = asyncio.ensure_future(anext(stream))
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert engine._worker.would_wait
        await stream.aclose()
        held.set()
        await asyncio.gather(*waiting)
        assert (await first).completion.finish_reason == "cancelled"

    asyncio.run(leave())
    finally_nothing_lost(engine)


@pytest.mark.parametrize("messages", [None, "hi", 5, ChatPrompt([{"role": "user", "content": "hi"}]), []])
def test_a_chat_prompt_without_messages_is_refused_in_either_way_of_asking(engine: Engine, messages: Any) -> None:
    for ask in (engine.count_tokens, engine.generate, lambda prompt: asyncio.run(engine.agenerate(prompt))):
        with pytest.raises(InvalidRequest, match="a prompt is a text"):
            ask(ChatPrompt(messages))
