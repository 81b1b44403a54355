"""The streaming server: events as they come, errors by name, and a client that goes away takes its request with it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cortexmlx import Engine, SamplingParams
from support.core_driver import finally_nothing_lost
from support.examples import example
from support.held import hold_long_answers
from support.patience import PATIENCE


@pytest.fixture
def server(engine: Engine) -> Iterator[Any]:
    with example("http_stream/server.py").serve(engine) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def post(server: Any, body: bytes) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=PATIENCE)
    connection.request("POST", "/", body)
    return connection, connection.getresponse()


def events(response: http.client.HTTPResponse) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in response.read().splitlines() if line.startswith(b"data: ")]


@pytest.mark.parametrize("asked", [{"prompt": "the cat"}, {"messages": [{"role": "user", "content": "Hello?"}]}])
def test_an_answer_comes_in_pieces_and_whole(server: Any, engine: Engine, asked: dict[str, Any]) -> None:
    _, response = post(server, json.dumps({**asked, "max_tokens": 20, "temperature": 0, "stop": "never"}).encode())
    assert response.status == 200 and response.headers["Content-Type"] == "text/event-stream"
    *pieces, last = events(response)
    prompt: Any = asked.get("prompt") or asked["messages"]
    wanted = engine.generate(prompt, SamplingParams(max_tokens=20))
    assert "".join(piece["text"] for piece in pieces) == wanted.text and len(pieces) > 2
    assert last["usage"]["prompt_tokens"] == engine.count_tokens(prompt)
    assert last["finish_reason"] == wanted.finish_reason.value


BAD = {
    b"": "the body has 0 bytes",
    b"no json": "Expecting value",
    b"[1]": 'either "messages" or "prompt"',
    b'{"messages": [], "prompt": ""}': 'either "messages" or "prompt"',
    b'{"prompt": "a", "max_token": 5}': "not known here: max_token",
    b'{"prompt": "a", "temperature": -1}': "temperature is -1",
    b'{"prompt": []}': "the prompt is empty",
    b'{"prompt": 5}': "a prompt is a text",
}


@pytest.mark.parametrize("body", BAD)
def test_what_cannot_be_answered_is_refused_by_its_name(server: Any, body: bytes) -> None:
    _, response = post(server, body)
    assert response.status == 400 and BAD[body] in json.loads(response.read())["error"]


def test_a_client_that_goes_away_has_its_request_cancelled(server: Any, engine: Engine) -> None:
    server.RequestHandlerClass.quiet_seconds = 0.01
    hold_long_answers(engine)
    connection, response = post(server, b'{"prompt": "the cat", "max_tokens": 480}')
    response.fp.readline()
    response.close()
    connection.close()
    finally_nothing_lost(engine)


def test_one_that_goes_away_before_the_first_word_is_missed_too(server: Any, engine: Engine) -> None:
    """The engine's thread is held, as by a long prompt; comments find out that nobody reads."""
    server.RequestHandlerClass.quiet_seconds = 0.01
    held, seen = threading.Event(), threading.Event()
    threading.Thread(target=engine.inspect, args=(lambda core: (seen.set(), held.wait(PATIENCE)),)).start()
    assert seen.wait(PATIENCE)
    connection, response = post(server, b'{"prompt": "the cat", "max_tokens": 480}')
    assert response.fp.readline() == b":\n"
    response.close()
    connection.close()
    while not any(handle._cancelling for handle in list(engine._worker._handles.values())):
        time.sleep(0.01)
    held.set()
    finally_nothing_lost(engine)
    assert engine.stats().generated_tokens == 0


def test_a_request_that_fails_says_so_in_its_last_event(server: Any, engine: Engine) -> None:
    hold_long_answers(engine)
    _, response = post(server, b'{"prompt": "the cat", "max_tokens": 480}')
    engine.close()
    assert "engine was closed" in events(response)[-1]["error"]
