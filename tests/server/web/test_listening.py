"""An address is had at once or not at all, and the end comes in time."""

from __future__ import annotations

import json
import logging
import socket
import threading
from typing import Any

import httpx2 as httpx
import pytest

from cortexmlx import Engine
from cortexmlx.errors import CortexError
from cortexmlx.server import app
from cortexmlx.server.web.listening import Listening, bound
from support.patience import PATIENCE, soon


def test_an_address_that_is_taken_or_none_is_said() -> None:
    in_use = "is in use: stop the other server, or give --port another"
    with bound("127.0.0.1", 0) as taken, pytest.raises(CortexError, match=in_use):
        bound("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(CortexError, match=r"there is no address 'no\.such\.host\.invalid'"):
        bound("no.such.host.invalid", 0)
    with pytest.raises(CortexError, match=r"cannot listen on 192\.0\.2\.1"):
        bound("192.0.2.1", 0)


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")])
def test_the_address_is_one_that_can_be_asked(engine: Engine, host: str, shown: str) -> None:
    listening = Listening(app(engine), bound(host, 0))
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


def test_a_stream_that_runs_at_the_end_ends_or_is_cut(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice stopped, nothing is waited for, and nothing is an error."""
    listening = Listening(app(engine), bound("127.0.0.1", 0), grace=600.0)
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("uvicorn"), "handlers", [handler := logging.NullHandler()])
    monkeypatch.setattr(handler, "handle", logged.append)
    thread = threading.Thread(target=listening.run)
    thread.start()
    body: Any = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3000, "ignore_eos": True}
    with (
        httpx.Client(base_url=listening.url, timeout=PATIENCE, trust_env=False) as http,
        http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        listening.stop()
        listening.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        with pytest.raises(httpx.HTTPError):
            list(lines)
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
