"""An address is had at once or not at all, and the end comes in time."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from math import inf
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from cortexmlx import Engine
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.server import ServerSettings, app, listening
from cortexmlx.server.listening import (
    ConnectionLimits,
    HttpServer,
    LimitedConnection,
    open_listener,
    raise_file_limit,
)
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


def test_a_line_of_uvicorn_has_no_colours(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our stderr would write their control characters out."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with open_listener("127.0.0.1", 0) as listener:
        HttpServer(app(engine), listener)
    [shown] = logging.getLogger("uvicorn").handlers
    assert shown.format(
        logging.makeLogRecord({"levelno": logging.ERROR, "levelname": "ERROR", "msg": "x"})
    ).split() == ["ERROR:", "x"]


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
    """A stream gets an error event, a request that waits for its answer or still sends its body a 503, which all are in
    the log, where nothing is an error.
    """
    told: list[str] = []
    statuses: list[int] = []
    application = app(engine, ServerSettings(log=lambda request: statuses.append(request.status)))
    listening = HttpServer(application, open_listener("127.0.0.1", 0), grace=inf, tell=told.append)
    if not twice:
        listening._server.config.timeout_graceful_shutdown = 0

    async def wait_closed(server: Any) -> None:
        while server._active_count:  # as from Python 3.12 on
            await asyncio.sleep(0.01)

    monkeypatch.setattr(asyncio.base_events.Server, "wait_closed", wait_closed)
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("uvicorn"), "handlers", [handler := logging.NullHandler()])
    monkeypatch.setattr(handler, "handle", logged.append)
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
        assert soon(lambda: application.state.generation.request_limiter.open_count == 2 * len(BODIES) + 1)
        listening.stop()
        if twice:
            listening.stop()
        for thread in (server, *waiting):
            thread.join(PATIENCE)
            assert not thread.is_alive()
        limit = "as long as it takes" if twice else "up to 0 s"
        waits = f"waiting for 9 requests, for {limit}. Ctrl-C again ends it now."
        assert (told, statuses) == ([waits, "cut before their end: 9"], [503] * 9)
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


# -- Clients that take their time: each state of a connection has an end, and says why --------------------------------


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n"
Start = Callable[..., HttpServer]


@pytest.fixture
def start(engine: Engine) -> Iterator[Start]:
    """Serve with limits on connections; settings of the server may be given, too."""
    with ExitStack() as stack:

        def started(settings: dict[str, Any] | None = None, **limits: Any) -> HttpServer:
            application = app(engine, ServerSettings(**settings or {}))
            listening = HttpServer(application, open_listener("127.0.0.1", 0), limits=ConnectionLimits(**limits))
            thread = threading.Thread(target=listening.run)
            thread.start()
            stack.callback(thread.join, PATIENCE)
            stack.callback(listening.stop)
            return listening

        yield started


def connected(listening: HttpServer, receive_buffer: int | None = None) -> socket.socket:
    address = urlsplit(listening.url)
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(PATIENCE)
    client.connect((address.hostname, address.port))
    return client


def received(client: socket.socket) -> bytes:
    """All that the server says before it closes the connection."""
    said = b""
    with suppress(ConnectionResetError):
        while piece := client.recv(65536):
            said += piece
    return said


def refusal(said: bytes) -> tuple[int, str]:
    """The status and the message of an error reply."""
    head, _, body = said.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head[9:12]), json.loads(body)["error"]["message"]


def until(client: socket.socket, words: bytes) -> bytes:
    """What the server says up to some words."""
    said = b""
    while words not in said:
        piece = client.recv(65536)
        assert piece, said
        said += piece
    return said


def ask(client: socket.socket) -> None:
    """Ask for /health, and read the whole answer."""
    client.sendall(GET)
    assert until(client, b'{"status":"ok"}').startswith(b"HTTP/1.1 200")


def trickle(client: socket.socket, byte: bytes, closed: threading.Event) -> None:
    """Send a byte now and then, as long as the server takes them."""
    with suppress(OSError):
        while not closed.wait(0.02):
            client.sendall(byte)


@pytest.mark.parametrize("sent", [b"GET /health HTTP/1.1\r\nHost: loc", b"G"])
def test_headers_that_never_end_are_refused_however_they_trickle(start: Start, sent: bytes) -> None:
    with connected(start(head_seconds=0.3)) as client:
        client.sendall(sent)
        closed = threading.Event()
        thread = threading.Thread(target=trickle, args=(client, b"x", closed))
        thread.start()
        status, why = refusal(received(client))
        closed.set()
        thread.join(PATIENCE)
    assert status == 408 and "whole within 0.3 s" in why


def test_a_connection_that_says_nothing_is_closed_without_a_word(start: Start) -> None:
    with connected(start(head_seconds=0.2)) as client:
        assert received(client) == b""


def test_a_second_request_has_the_same_limit(start: Start) -> None:
    with connected(start(head_seconds=0.3)) as client:
        ask(client)
        client.sendall(b"GET /heal")
        assert refusal(received(client))[0] == 408


def test_an_idle_connection_is_closed(start: Start) -> None:
    with connected(start(idle_seconds=1)) as client:
        client.sendall(GET)
        assert received(client).endswith(b'{"status":"ok"}')


def test_a_body_that_never_ends_is_refused(start: Start) -> None:
    with connected(start({"body_seconds": 0.3}, head_seconds=0.3, idle_seconds=PATIENCE)) as client:
        client.sendall(CHAT + b'{"messages"')
        said = until(client, b"which is not all of it")
        assert said.startswith(b"HTTP/1.1 408") and b"11 bytes of the body have come in 0.3 s" in said
        received(client)  # it is closed, though the body never comes


def test_a_body_that_nobody_reads_ends_too(start: Start) -> None:
    with connected(start(head_seconds=0.3, idle_seconds=PATIENCE)) as client:
        client.sendall(CHAT.replace(b"/v1/chat/completions", b"/nothing"))
        closed = threading.Event()
        thread = threading.Thread(target=trickle, args=(client, b" ", closed))
        thread.start()
        assert received(client).startswith(b"HTTP/1.1 404")
        closed.set()
        thread.join(PATIENCE)


def test_the_rest_of_a_refused_body_is_no_second_request(start: Start) -> None:
    """What was answered early is read to its end, and then the connection serves on without a limit left over."""
    with connected(start({"max_body": 100}, head_seconds=0.5, idle_seconds=60)) as client:
        client.sendall(CHAT)
        assert until(client, b'"code":null}}').startswith(b"HTTP/1.1 413")
        client.sendall(b"x" * 500)
        ask(client)
        ask(client)


def test_headers_that_are_too_large_are_431_and_nonsense_is_400(start: Start) -> None:
    for sent, expected, says in (
        (GET[:-2] + b"X: " + b"y" * 5000, 431, "at most 2,000 bytes"),
        (b"\x16\x03\x01 TLS perhaps\r\n\r\n", 400, "no HTTP request"),
    ):
        with connected(start(head_bytes=2000)) as client:
            client.sendall(sent)
            status, why = refusal(received(client))
        assert status == expected and says in why


def test_one_connection_more_than_allowed_is_refused_while_the_others_are_in_use(start: Start) -> None:
    listening = start(connections=2)
    with connected(listening) as one, connected(listening) as two:
        for client in (one, two):
            client.sendall(GET[:10])
        with connected(listening) as third:
            status, why = refusal(received(third))
        assert status == 503 and "2 connections are in use" in why
        one.sendall(GET[10:])
        assert one.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_crowd_is_refused_with_few_files_open_at_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made, counts, crowd = LimitedConnection.connection_made, list[int](), 130
    monkeypatch.setattr(
        LimitedConnection,
        "connection_made",
        lambda self, *given: (made(self, *given), counts.append(len(self.connections))),
    )
    with ExitStack() as stack:
        listening = HttpServer(app(engine), open_listener("127.0.0.1", 0), limits=ConnectionLimits(connections=2))
        clients = [stack.enter_context(connected(listening)) for _ in range(crowd)]
        thread = threading.Thread(target=listening.run)
        thread.start()
        stack.callback(thread.join, PATIENCE)
        stack.callback(listening.stop)
        assert {refusal(received(client))[0] for client in clients[2:]} == {503}
    assert len(counts) == crowd and max(counts) < crowd / 2, max(counts)


def test_an_idle_connection_makes_room_for_a_new_one(start: Start) -> None:
    listening = start(connections=1, idle_seconds=PATIENCE)
    with connected(listening) as old:
        ask(old)
        with connected(listening) as new:
            ask(new)
        assert received(old) == b""


def test_who_reads_nothing_of_a_stream_is_cut_and_its_request_cancelled(start: Start, engine: Engine) -> None:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 3000,
            "ignore_eos": True,
            "stream": True,
            "logprobs": True,
            "top_logprobs": 20,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    listening = start(send_seconds=0.3)
    listening._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the connections' own, too
    with connected(listening, receive_buffer=4096) as client:
        before = engine.stats().generated_tokens
        client.sendall(head.encode() + body)
        assert soon(lambda: engine.stats().generated_tokens > before)
        assert soon(lambda: engine.stats().rows_running == 0)
        assert soon(lambda: not listening._server.server_state.connections)


def test_a_body_in_tiny_chunks_is_read_in_pieces_and_a_bad_chunk_is_400(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """h11 took 0.6 s for what asyncio reads at once otherwise, and nobody else was heard."""
    sizes, receive = list[int](), listening.LimitedConnection.data_received
    monkeypatch.setattr(
        listening.LimitedConnection, "data_received", lambda *given: (sizes.append(len(given[1])), receive(*given))
    )
    head = CHAT.replace(b"Content-Length: 500", b"Transfer-Encoding: chunked")
    with connected(start()) as client:
        client.sendall(head + b"1\r\n \r\n" * 50_000 + b"zz\r\nnonsense\r\n")
        assert refusal(received(client))[0] == 400
    assert max(sizes) <= listening.MAX_READ and "Traceback" not in caplog.text


@pytest.mark.parametrize("name", ["head_seconds", "idle_seconds", "send_seconds", "head_bytes", "connections"])
def test_limits_are_above_zero(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is 0, but must be above 0"):
        ConnectionLimits(**{name: 0})


def test_connections_are_as_many_as_files_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    asked: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 300))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: asked.append(limits))
    assert raise_file_limit(1000) == 300 - 128 and asked == [(300, 300)]
    assert raise_file_limit(100) == 100

    def refuse(which: int, limits: Any) -> None:
        raise ValueError

    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_file_limit(1000) == 256 - 128


def test_ordinary_requests_on_one_connection_are_not_disturbed(start: Start) -> None:
    with httpx.Client(base_url=start(head_seconds=0.5).url, timeout=PATIENCE, trust_env=False) as http:
        body: Any = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
        for _ in range(20):
            assert http.post("/v1/chat/completions", json=body).status_code == 200
