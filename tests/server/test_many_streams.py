"""A thousand streams, of which half are dropped: nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from typing import Any

import httpx2 as httpx
import pytest

from cortexmlx import Engine
from cortexmlx.server import ServerSettings, app
from cortexmlx.server.listening import ConnectionLimits, Listening, bound
from support.engine.core_driver import finally_nothing_lost
from support.patience import PATIENCE, soon

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc"),
]
STREAMS, AT_ONCE = 1000, 200


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_thousand_streams_of_which_half_are_dropped(engine: Engine) -> None:
    application = app(engine, ServerSettings(max_open=AT_ONCE))
    listening = Listening(application, bound("127.0.0.1", 0), limits=ConnectionLimits(connections=4 * AT_ONCE))
    thread = threading.Thread(target=listening.run)
    thread.start()
    try:
        asyncio.run(one(listening.url, 3))  # what is made at the first request stays
        files, threads = open_files(), threading.active_count()
        ended, dropped = asyncio.run(all_of(listening.url))
        assert ended > STREAMS / 4 and dropped > STREAMS / 4 and ended + dropped == STREAMS
        assert soon(lambda: application.state.generation.open == 0)
        assert soon(lambda: open_files() <= files), (open_files(), files)
        assert soon(lambda: threading.active_count() <= threads)
        finally_nothing_lost(engine)
    finally:
        listening.stop()
        thread.join(PATIENCE)
    assert not thread.is_alive()
    engine.check_invariants()


async def all_of(url: str) -> tuple[int, int]:
    """Return how many streams were read to their end, and how many were dropped."""
    draw, gate = random.Random(5), asyncio.Semaphore(AT_ONCE)

    async def asked(events: int | None) -> bool:
        async with gate:
            return await one(url, events)

    after = [draw.choice([None, draw.randrange(4)]) for _ in range(STREAMS)]
    told = await asyncio.gather(*map(asked, after))
    return sum(told), len(told) - sum(told)


async def one(url: str, events: int | None) -> bool:
    """Ask for a stream, and read it to its end, or leave after so many events. Return whether it has ended."""
    body: Any = {"prompt": [1, 2, 3], "max_tokens": 12, "stream": True, "ignore_eos": True}
    web = httpx.AsyncClient(trust_env=False, timeout=PATIENCE)
    async with web as client, client.stream("POST", f"{url}/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        seen, last = 0, ""
        async for line in reply.aiter_lines():
            if events is not None and seen >= events:
                return False
            seen += line.startswith("data: {")
            last = line or last
    return last == "data: [DONE]"
