"""Requests that generate text: nothing is computed for nobody, and a reader holds up nobody."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from cortexmlx import Engine, SamplingParams
from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.openai import chat_completions
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.server import app, generation
from cortexmlx.server.generation import EventMailbox
from cortexmlx.server.http import with_error_replies
from cortexmlx.types.progress import Progress
from cortexmlx.types.request import TokenEvent
from support.engine.held import hold_long_answers
from support.patience import PATIENCE, soon

LONG: Any = {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 3000, "ignore_eos": True}


def idle(engine: Engine) -> bool:
    return engine.stats().rows_running == 0 and engine.stats().rows_waiting == 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_client_asked_that_has_gone_is_cancelled(serve: Any, engine: Engine, stream: bool) -> None:
    address = urlsplit(serve())
    body = json.dumps({**LONG, "stream": stream}).encode()
    before = engine.stats().generated_tokens
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        assert soon(lambda: engine.stats().generated_tokens > before + 5)
    assert soon(lambda: idle(engine))
    assert engine.stats().generated_tokens - before < 3000


def test_many_streams_of_which_half_are_dropped_leave_nothing(serve: Any, engine: Engine) -> None:
    url, draw = serve(max_open=200), random.Random(0)
    ended: list[int] = []

    def one(drop: bool) -> None:
        with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as http:
            body = {**LONG, "max_tokens": 10, "stream": True}
            with http.stream("POST", "/v1/chat/completions", json=body) as reply:
                lines = reply.iter_lines()
                next(lines)
                if not drop:
                    ended.append(sum(line == "data: [DONE]" for line in lines))

    drops = [draw.random() < 0.5 for _ in range(24)]
    threads = [threading.Thread(target=one, args=(drop,)) for drop in drops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert ended == [1] * drops.count(False)
    assert soon(lambda: idle(engine))
    with httpx.Client(base_url=url, trust_env=False) as http:
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("gone", [True, False])
def test_who_has_gone_is_no_error_and_who_reads_too_slowly_is_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    async def events() -> list[Any]:
        asked = chat_completions.read(LONG, RequestDefaults(SamplingParams()))
        answer = generation.HttpRequestAnswers(engine, EventMailbox(asyncio.get_running_loop()), asked)
        if gone:
            await answer.submit(None, None)
            answer.close()
        monkeypatch.setattr(generation, "MAX_QUEUED_EVENTS", 4)
        if not gone:
            await answer.submit(None, None)
        async with asyncio.timeout(PATIENCE):
            while not answer.closed:
                await asyncio.sleep(0)
            return [batch async for batch in answer.events(PATIENCE)]

    batches = asyncio.run(events())
    told = [each for batch in batches for each in batch]
    errors = [said.error for _, said in told if said.error is not None]
    if gone:
        assert not errors
    else:
        assert len(batches) == 1 and len(told) == 6  # what waits is one write
        assert errors == [told[-1][1].error] and isinstance(errors[0], generation.SlowClient)
    assert soon(lambda: idle(engine))


@pytest.mark.parametrize(
    ("path", "ping", "end"),
    [
        ("/v1/chat/completions", [": still here"], "data: [DONE]"),
        ("/v1/messages", ["event: ping", 'data: {"type": "ping"}'], 'data: {"type":"message_stop"}'),
    ],
)
def test_a_quiet_stream_says_that_it_is_there(serve: Any, engine: Engine, path: str, ping: list[str], end: str) -> None:
    let_go = hold_long_answers(engine, tokens=3)
    try:
        with httpx.Client(base_url=serve(quiet=0.05), timeout=PATIENCE, trust_env=False) as http:
            body = {"messages": LONG["messages"], "max_tokens": 30, "stream": True, "temperature": 0}
            with http.stream("POST", path, json=body) as reply:
                lines = reply.iter_lines()
                assert ping[0] in lines and [next(lines) for _ in ping[1:]] == ping[1:]
                let_go()
                assert [line for line in lines if line][-1] == end
    finally:
        let_go()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_stream_whose_events_write_nothing_pings(
    serve: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A long prompt reports its progress several times a second, of which most protocols write nothing."""
    real, let_go = generation.HttpRequestAnswers.events, hold_long_answers(engine, tokens=1)

    async def report_progress(answers: generation.HttpRequestAnswers, seconds: float) -> None:
        for computed in range(20):
            await asyncio.sleep(seconds)
            answers._events.append((0, TokenEvent("", progress=Progress("prefilling", computed, 20, cached=0))))
            answers._news.set()
        await asyncio.to_thread(let_go)

    async def events(answers: generation.HttpRequestAnswers, quiet: float) -> AsyncIterator[Any]:
        reports = asyncio.create_task(report_progress(answers, quiet / 4))
        async for item in real(answers, quiet):
            yield item
        await reports

    monkeypatch.setattr(generation.HttpRequestAnswers, "events", events)
    try:
        with httpx.Client(base_url=serve(quiet=0.05), timeout=PATIENCE, trust_env=False) as http:
            body = {"messages": LONG["messages"], "max_tokens": 3, "stream": True}
            with http.stream("POST", path, json=body) as reply:
                lines = list(reply.iter_lines())
        assert sum(line in (": still here", "event: ping") for line in lines) >= 2
    finally:
        let_go()


def test_an_error_keeps_nothing_of_its_request() -> None:
    """The frames in its traceback hold the body, which would stay until the garbage collector looks."""

    class Body:
        pass

    kept: list[weakref.ref[Body]] = []

    async def answer(request: Request) -> Response:
        body = Body()
        kept.append(weakref.ref(body))
        raise InvalidRequest("wrong")

    gc.disable()
    try:
        reply = asyncio.run(
            with_error_replies(answer)(Request({"type": "http", "path": "/v1/messages", "headers": []}))
        )
        assert reply.status_code == 400 and kept[0]() is None
    finally:
        gc.enable()


def test_too_many_are_told_to_come_again(serve: Any, engine: Engine) -> None:
    with httpx.Client(base_url=serve(max_open=1), timeout=PATIENCE, trust_env=False) as http:
        with http.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) as first:
            lines = first.iter_lines()  # if it were dropped, the request would be cancelled
            next(lines)
            reply = http.post("/v1/chat/completions", json=LONG)
            assert reply.status_code == 429 and reply.headers["retry-after"] == "1"
            assert reply.json()["error"]["type"] == "rate_limit_error"
        assert soon(lambda: http.post("/v1/chat/completions", json={**LONG, "max_tokens": 1}).status_code == 200)


def test_a_client_that_is_gone_before_its_stream_begins_leaves_nothing(engine: Engine) -> None:
    application = app(engine)

    async def ask() -> None:
        body = json.dumps({**LONG, "stream": True}).encode()
        messages = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return messages.pop(0) if len(messages) > 1 else messages[0]

        async def send(message: Any) -> None:
            await asyncio.sleep(0)  # where a task that was cancelled ends

        scope: Any = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"host", b"localhost")],
        }
        await application(scope, receive, send)

    for _ in range(3):  # each in a loop of its own
        asyncio.run(ask())
    assert application.state.generation.request_limiter.open_count == 0
    assert soon(lambda: idle(engine))


# Events for many streams wake the loop once, and none is lost.


def test_events_that_come_together_wake_the_loop_once() -> None:
    async def read() -> None:
        mailbox, got = EventMailbox(asyncio.get_running_loop()), list[str]()

        def put() -> None:
            for number in range(1000):
                mailbox.put(lambda event: got.append(event.text), TokenEvent(str(number)))

        thread = threading.Thread(target=put)
        thread.start()
        thread.join()  # the loop is busy meanwhile
        await asyncio.sleep(0)
        assert got == list(map(str, range(1000))) and mailbox.wakeups == 1

    asyncio.run(read())


def test_no_event_is_left_behind_while_the_loop_reads() -> None:
    async def read() -> None:
        mailbox, got, done = EventMailbox(asyncio.get_running_loop()), list[int](), asyncio.Event()

        def take(event: TokenEvent) -> None:
            got.append(int(event.text))
            if len(got) == 20_000:
                done.set()

        def put(first: int) -> None:
            for number in range(first, 20_000, 2):
                mailbox.put(take, TokenEvent(str(number)))

        threads = [threading.Thread(target=put, args=(first,)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        await done.wait()
        assert sorted(got) == list(range(20_000))
        assert [n for n in got if n % 2] == list(range(1, 20_000, 2)), "each stream's events come in order"

    asyncio.run(read())


def test_a_closed_loop_is_told_nothing() -> None:
    loop = asyncio.new_event_loop()
    mailbox = EventMailbox(loop)
    loop.close()
    mailbox.put(lambda event: None, TokenEvent("a"))
