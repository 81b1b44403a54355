"""An answer while it is written: kept when it is whole, once, and not when nobody reads it to its end."""

from __future__ import annotations

import asyncio
import gc
import threading
from dataclasses import replace
from typing import Any

import pytest

from cortexmlx.core.handle import RequestHandle
from cortexmlx.errors import InvalidRequest, PromptTooLong
from cortexmlx.sessions.reply import AsyncReply, Reply, StartedTurn
from cortexmlx.sessions.turn import Transcript, Turn
from cortexmlx.types.request import Completion, FinishReason, RequestId, TokenEvent, Usage
from support.patience import PATIENCE

DONE = Completion("ab", (1, 2), FinishReason.STOP, Usage(3, 2), timings=None)  # type: ignore[arg-type]
TURN = Turn((), Transcript(), [3], "")


class Asked:
    """A request whose events are pushed by hand, and what was kept of it."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []
        self.kept: list[Completion] = []
        self.handle = RequestHandle(RequestId(7), self.cancelled.append)

    def finish(self) -> None:
        self.handle.push(TokenEvent("a", 1))
        self.handle.push(TokenEvent("b", 2, finish_reason=FinishReason.STOP, completion=DONE))


def test_the_turn_is_kept_once_when_the_last_event_is_handed_out() -> None:
    asked = Asked()
    reply = Reply(StartedTurn(asked.handle, TURN, asked.kept.append))
    asked.finish()
    assert next(reply).text == "a" and not asked.kept and not reply.ended
    assert next(reply).completion is DONE and asked.kept == [DONE] and reply.ended
    assert reply.result() is DONE and asked.kept == [DONE]


@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_who_stops_reading_cancels_and_keeps_nothing(how: str) -> None:
    asked = Asked()
    reply: Any = Reply(StartedTurn(asked.handle, TURN, asked.kept.append))
    asked.handle.push(TokenEvent("a", 1))
    if how == "close":
        reply.close()
    elif how == "with":
        with reply:
            next(reply)
    del reply
    gc.collect()
    assert asked.cancelled == [7] and not asked.kept


def test_it_knows_what_was_handed_out_of_the_first_of_its_answers() -> None:
    asked = Asked()
    reply = Reply(StartedTurn(asked.handle, TURN, asked.kept.append))
    for event in (
        TokenEvent("", 1, thinking="so"),
        TokenEvent("b", 2, index=1),
        TokenEvent("a", 3),
        TokenEvent("c", 4),
    ):
        asked.handle.push(event)
    assert reply._read_so_far == ("", "")
    for _ in range(3):
        next(reply)
    assert reply._read_so_far == ("a", "so") and reply._turn is TURN


def test_cancelling_keeps_what_there_is() -> None:
    asked = Asked()
    reply = Reply(StartedTurn(asked.handle, TURN, asked.kept.append))
    reply.cancel()
    assert asked.cancelled == [7] and not reply.ended
    asked.finish()
    with reply:  # a Stop button leaves it so
        pass
    assert reply.result() is DONE and asked.kept == [DONE]


def test_an_error_ends_it() -> None:
    asked = Asked()
    reply = Reply(StartedTurn(asked.handle, TURN, asked.kept.append))
    asked.handle.fail(PromptTooLong("too long"))
    with pytest.raises(PromptTooLong):
        reply.result()
    assert reply.ended and not asked.kept


def test_the_same_for_asyncio() -> None:
    async def read(asked: Asked, closing: bool) -> None:
        def begin(listener: Any) -> StartedTurn:
            assert threading.current_thread() is not threading.main_thread()
            asked.handle = RequestHandle(RequestId(7), asked.cancelled.append, listener)
            asked.handle.push(TokenEvent("a", 1))
            return StartedTurn(asked.handle, replace(TURN, opened="<think>"), asked.kept.append)

        reply = AsyncReply(lambda: begin)
        assert not reply.prompt
        assert (await anext(reply)).text == "a"
        assert (reply.prompt, reply.opened) == ([3], "<think>")
        if closing:
            await reply.aclose()
            assert reply.ended
            return
        async with reply:
            reply.cancel()
            asked.finish()
        assert await reply.result() is DONE

    whole, closed = Asked(), Asked()
    asyncio.run(read(whole, closing=False))
    asyncio.run(read(closed, closing=True))
    assert whole.kept == [DONE] and whole.cancelled == [7]
    assert not closed.kept and closed.cancelled == [7]


def test_the_result_of_a_reply_that_was_closed_holds_up_no_event_loop() -> None:
    asked = Asked()

    async def read() -> None:
        reply = AsyncReply(lambda: lambda listener: StartedTurn(asked.handle, TURN, asked.kept.append))
        reading = asyncio.ensure_future(anext(reply))
        while not reply.prompt:
            await asyncio.sleep(0.001)
        await reply.aclose()
        result = asyncio.ensure_future(reply.result())
        await asyncio.sleep(0)
        asked.finish()
        assert await asyncio.wait_for(result, PATIENCE) is DONE
        reading.cancel()

    asyncio.run(read())
    assert asked.cancelled and not asked.kept


@pytest.mark.parametrize("how", ["close", "fail"])
def test_what_never_began_has_no_result(how: str) -> None:
    def refuse(listener: Any) -> StartedTurn:
        raise PromptTooLong("too long")

    async def read() -> None:
        reply = AsyncReply(lambda: refuse)
        if how == "close":
            await reply.aclose()
        else:
            with pytest.raises(PromptTooLong):
                await anext(reply)
        with pytest.raises(InvalidRequest, match="before its request began"):
            await reply.result()

    asyncio.run(read())


@pytest.mark.parametrize("how", ["cancel", "task"])
def test_what_is_cancelled_before_its_request_is_there_is_cancelled_with_it(how: str) -> None:
    asked, begun, may_go_on = Asked(), threading.Event(), threading.Event()

    def begin(listener: Any) -> StartedTurn:
        begun.set()
        may_go_on.wait(PATIENCE)
        return StartedTurn(asked.handle, TURN, asked.kept.append)

    async def cancel() -> None:
        task = asyncio.ensure_future(anext(reply := AsyncReply(lambda: begin)))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        reply.cancel() if how == "cancel" else task.cancel()
        await asyncio.sleep(0)
        may_go_on.set()
        while not asked.cancelled:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(cancel())
    assert asked.cancelled == [7]


def test_a_second_reader_is_refused_and_the_turn_is_kept() -> None:
    asked, begun = Asked(), []

    def begin(listener: Any) -> StartedTurn:
        begun.append(listener)
        asked.handle = RequestHandle(RequestId(7), asked.cancelled.append, listener)
        return StartedTurn(asked.handle, TURN, asked.kept.append)

    async def read() -> None:
        reply = AsyncReply(lambda: begin)
        first = asyncio.ensure_future(anext(reply))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest, match="another task"):
            await anext(reply)
        assert not reply.ended
        while not (reply.prompt or first.done()):
            await asyncio.sleep(0.001)
        asked.finish()
        assert (await first).text == "a" and await reply.result() is DONE

    asyncio.run(read())
    assert len(begun) == 1 and asked.kept == [DONE] and not asked.cancelled
