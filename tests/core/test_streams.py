"""Answers as iterators: whoever stops reading has the request cancelled."""

from __future__ import annotations

import asyncio
import itertools
import threading
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any

import pytest

from cortexmlx import Engine
from cortexmlx.errors import EngineClosed, InvalidRequest
from cortexmlx.types.request import TokenEvent
from support.engine.asked import LONG, PROMPT, SHORT
from support.engine.core_driver import finally_nothing_lost
from support.engine.held import hold_long_answers
from support.patience import PATIENCE


def test_closing_a_stream_cancels_its_request(engine: Engine) -> None:
    hold_long_answers(engine)
    stream = engine.stream(PROMPT, LONG)
    next(stream)
    stream.close()
    assert list(stream) == []
    finally_nothing_lost(engine)


@pytest.mark.parametrize("end", ["closed", "left", "dropped", "used up"])
def test_a_stream_that_was_never_started_is_cancelled(engine: Engine, end: str) -> None:
    hold_long_answers(engine)
    stream: Any = engine.stream(PROMPT, LONG)
    if end == "closed":
        with closing(stream):
            pass
    elif end == "left":
        with stream:
            pass
    elif end == "dropped":
        del stream
    else:
        stream.close()
        stream.close()
        assert next(stream, None) is None
    finally_nothing_lost(engine)


def test_a_stream_raises_at_the_call_what_is_wrong(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        engine.stream([])


def test_an_astream_that_was_never_started_asks_for_nothing(engine: Engine) -> None:
    async def leave() -> None:
        engine.astream(PROMPT, LONG)
        async with aclosing(engine.astream(PROMPT, LONG)), engine.astream(PROMPT, LONG) as stream:
            pass
        assert [event async for event in stream] == []

    asyncio.run(leave())
    assert engine.stats().prompt_tokens == 0


def test_an_event_loop_that_closes_under_a_stream_harms_nobody(engine: Engine) -> None:
    hold_long_answers(engine)
    loop = asyncio.new_event_loop()
    stream = engine.astream(PROMPT, LONG)
    loop.run_until_complete(anext(stream))
    loop.close()
    assert len(engine.generate(PROMPT, SHORT).token_ids) == 12
    before = engine.stats().requests_finished
    assert engine.stats().rows_running == 1
    del stream
    finally_nothing_lost(engine)
    assert engine.stats().requests_finished == before + 1


def test_an_astream_belongs_to_one_event_loop(engine: Engine) -> None:
    hold_long_answers(engine)
    stream = engine.astream(PROMPT, LONG)

    async def read() -> TokenEvent:
        return await anext(stream)

    asyncio.run(read())
    with pytest.raises(InvalidRequest, match="another event loop"):
        asyncio.run(read())
    finally_nothing_lost(engine)


def test_an_astream_raises_that_the_engine_was_closed(tiny: Any) -> None:
    engine = Engine(tiny("llama"), kv_memory="256KB", block_size=8)
    hold_long_answers(engine)

    async def read() -> None:
        stream = engine.astream(PROMPT, LONG)
        await anext(stream)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineClosed):
            async for _ in stream:
                pass
        assert [event async for event in stream] == []

    asyncio.run(read())


def test_a_stream_keeps_its_engine(tiny: Any) -> None:
    *_, last = Engine(tiny("llama"), kv_memory="256KB", block_size=8).stream(PROMPT, SHORT)
    assert len(last.completion.token_ids) == 12


def test_threads_may_share_a_stream(engine: Engine) -> None:
    """Each event is one thread's, and all of them see the end."""
    stream, read = engine.stream(PROMPT, replace(LONG, max_tokens=100)), list[TokenEvent]()
    threads = [threading.Thread(target=lambda: read.extend(stream), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    (last,) = [event.completion for event in read if event.completion]
    assert len(last.token_ids) == 100
    assert sorted(last.token_ids) == sorted(event.token_id for event in read if event.token_id is not None)


@pytest.mark.parametrize("first", [True, False])
def test_a_second_task_that_reads_an_astream_is_refused_and_asks_for_nothing(engine: Engine, first: bool) -> None:
    """While the first event is waited for, for which the request is submitted, and later. The engine makes no token for
    which the task would not have to wait: a logits processor holds it until the others are refused.
    """
    may_go_on = threading.Event()
    asked = itertools.count()

    def hold(_tokens: Any, logits: Any) -> Any:
        if next(asked) >= (not first):
            assert may_go_on.wait(PATIENCE)
        return logits

    async def read() -> list[TokenEvent]:
        stream = engine.astream(PROMPT, replace(SHORT, logits_processors=(hold,)))
        begun = [] if first else [await anext(stream)]
        tasks = [asyncio.ensure_future(anext(stream)) for _ in range(3)]
        try:
            others = await asyncio.gather(*tasks[1:], return_exceptions=True)
        finally:
            may_go_on.set()
        assert all(isinstance(other, InvalidRequest) and "another task" in str(other) for other in others)
        return [*begun, await tasks[0], *[event async for event in stream]]

    events = asyncio.run(read())
    assert events[-1].completion is not None and len(events) == 13
    finally_nothing_lost(engine)
    assert engine.stats().prompt_tokens == len(PROMPT)
