"""However many ask, one call runs at a time, and errors are shared, too."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cortexmlx.errors import EngineClosed
from cortexmlx.server.monitoring import SharedResult
from support.patience import PATIENCE


def test_all_who_ask_at_once_get_one_result() -> None:
    calls: list[int] = []
    go = threading.Event()

    def make() -> int:
        calls.append(len(calls))
        assert go.wait(PATIENCE)
        return calls[-1]

    async def ask() -> None:
        shared = SharedResult(make, every=3600.0)
        asked = [asyncio.create_task(shared.take()) for _ in range(200)]
        await asyncio.sleep(0)
        asked[0].cancel()
        asked[7].cancel()
        go.set()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert results.count(0) == 198 and calls == [0]
        assert await shared.take() == 0, "the next call is not due"

    asyncio.run(ask())


def test_an_error_is_shared_and_kept_as_long_as_a_result() -> None:
    calls = 0

    def make() -> None:
        nonlocal calls
        calls += 1
        raise EngineClosed("closed")

    async def ask(shared: SharedResult[None], times: int) -> None:
        errors = await asyncio.gather(*(shared.take() for _ in range(times)), return_exceptions=True)
        assert len(errors) == times and all(isinstance(error, EngineClosed) for error in errors)
        with pytest.raises(EngineClosed):
            await shared.take()

    asyncio.run(ask(SharedResult(make, every=3600.0), 20))
    assert calls == 1


def test_callers_who_have_all_gone_leave_no_complaint() -> None:
    said: list[object] = []
    go = threading.Event()

    def make() -> None:
        assert go.wait(PATIENCE)
        raise EngineClosed("closed")

    async def ask() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))
        shared = SharedResult(make, every=0.0)
        asked = asyncio.create_task(shared.take())
        await asyncio.sleep(0)
        asked.cancel()
        assert isinstance((await asyncio.gather(asked, return_exceptions=True))[0], asyncio.CancelledError)
        go.set()
        with pytest.raises(EngineClosed):
            await shared.take()
        del shared

    asyncio.run(ask())
    assert said == []
