"""An address is had at once or not at all, and the end comes in time."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from contextlib import ExitStack
from typing import Any

import httpx2 as httpx
import pytest

from cortexmlx import Engine
from cortexmlx.errors import CortexError
from cortexmlx.server import app
from cortexmlx.server.listening import HttpServer, open_listener
from support.engine.held import hold_long_answers
from support.patience import PATIENCE, soon


def test_an_address_that_is_taken_or_none_is_said() -> None:
    in_use = "is in use: stop the other server, or give --port another"
    with open_listener("127.0.0.1", 0) as taken, pytest.raises(CortexError, match=in_use):
        open_listener("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(CortexError, match=r"there is no address 'no\.such\.host\.invalid'"):
        open_listener("no.such.host.invalid", 0)
    with pytest.raises(CortexError, match=r"cannot listen on 192\.0\.2\.1"):
        open_listener("192.0.2.1", 0)


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")])
def test_the_address_is_one_that_can_be_asked(engine: Engine, host: str, shown: str) -> None:
    listening = HttpServer(app(engine), open_listener(host, 0))
    thread = threading.Thread(target=listening.run)
    thread.start()
    try:
        assert listening.url.startswith(f"http://{shown}:")
        with httpx.Client(base_url=listening.url, trust_env=False) as http:
            assert http.get("/health").status_code == 200
    finally:
        listening.stop()
        thread.join(PATIENCE)
    with pytest.raises(httpx.ConnectError), httpx.Client(base_url=listening.url, trust_env=False) as http:
        http.get("/health")


BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3000},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3000},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3000},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3000},
}


@pytest.mark.parametrize("twice", [False, True])
def test_what_runs_when_the_grace_is_over_is_told_so_in_its_protocol(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, twice: bool
) -> None:
    """A stream gets an error event, a request that waits for its answer or still sends its body a 503. Nothing is an
    error in the log.
    """
    application = app(engine)
    listening = HttpServer(application, open_listener("127.0.0.1", 0), grace=600.0)
    listening._server.config.timeout_graceful_shutdown = None if twice else 0
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("uvicorn"), "handlers", [handler := logging.NullHandler()])
    monkeypatch.setattr(handler, "handle", lambda record: record.exc_info and logged.append(record))
    server = threading.Thread(target=listening.run)
    server.start()
    replies: dict[str, httpx.Response] = {}

    def wait(path: str) -> None:
        with httpx.Client(base_url=listening.url, timeout=PATIENCE, trust_env=False) as client:
            replies[path] = client.post(path, json=BODIES[path])

    with ExitStack() as stack:
        stack.callback(hold_long_answers(engine))
        http = stack.enter_context(httpx.Client(base_url=listening.url, timeout=PATIENCE, trust_env=False))
        streams = {
            path: stack.enter_context(http.stream("POST", path, json={**body, "stream": True}))
            for path, body in BODIES.items()
        }
        waiting = [threading.Thread(target=wait, args=(path,)) for path in BODIES]
        for thread in waiting:
            thread.start()
        slow = stack.enter_context(socket.create_connection(listening._socket.getsockname(), timeout=PATIENCE))
        slow.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        assert soon(lambda: application.state.generation.open_requests == 2 * len(BODIES) + 1)
        listening.stop()
        if twice:
            listening.stop()
        for thread in (server, *waiting):
            thread.join(PATIENCE)
            assert not thread.is_alive()
        ends = {path: reply.read().decode() for path, reply in streams.items()}
        head, _, body = slow.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ") and json.loads(body)["error"]["type"] == "overloaded_error"
    for path, reply in replies.items():
        said = reply.json()
        assert reply.status_code == 503 and "the server ends" in said["error"]["message"], path
        assert (said.get("type") == "error") is (path == "/v1/messages")
    for path, text in ends.items():
        last = json.loads(text.strip().rsplit("data: ", 1)[1])
        error = last["response"]["error"] if path == "/v1/responses" else last["error"]
        assert "the server ends" in error["message"], text
    assert not logged and soon(lambda: engine.stats().rows_running == 0)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
    ],
)
def test_odd_requests_get_an_answer_and_the_server_goes_on(serve: Any, sent: bytes) -> None:
    url = httpx.URL(serve())
    with socket.create_connection((url.host, url.port), timeout=PATIENCE) as client:
        client.sendall(sent)
        got = client.recv(65536)
    assert got.startswith(b"HTTP/1.1 ") and b"root:" not in got
    assert int(got[9:12]) in ((200,) if b"/health" in sent and len(sent) < 1000 else (400, 404, 431))
    with httpx.Client(base_url=url, trust_env=False) as http:
        assert json.loads(http.get("/health").content) == {"status": "ok"}


def test_writing_to_a_client_that_has_gone_is_no_line_in_the_log(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with open_listener("127.0.0.1", 0) as listener:
        HttpServer(app(engine), listener)
    mine, theirs = socket.socketpair()

    async def write() -> None:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=mine)
        theirs.close()
        for _ in range(20):  # as events of a stream that are ready together
            transport.write(b"data: {}\n\n")
        logging.getLogger("asyncio").warning("something else")

    asyncio.run(write())
    assert caplog.messages == ["something else"]
