"""The study of load: what clients see of a server, and what counts as a failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cortexmlx.bench.studies.serving.load import WARM, request_body, run_load

ANSWERS = {
    "good": b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: {"choices":[{"delta":{"content":"b"}}]}\n\n'
    b'data: {"choices":[],"usage":{"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":3}}}\n\n'
    b"data: [DONE]\n\n",
    "empty": b"data: [DONE]\n\n",
    "broken": b"data: {\n\n",
}


@pytest.fixture(params=["good", "empty", "broken"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """A server that streams always the same; its kind and its port."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(ANSWERS[request.param])

        def log_message(self, *said: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield request.param, listening.server_port
        listening.shutdown()
        thread.join()


def test_an_answer_without_tokens_is_a_failure(server: tuple[str, int]) -> None:
    kind, port = server
    run = run_load(port, "agent", 4, 8, 2, "m")
    if kind == "good":
        assert (run.answered_count, run.tokens, run.cached, len(run.gaps), run.failures) == (8, 16, 24, 8, [])
    else:
        assert run.answered_count == 0 and len(run.failures) == 8 and run.seconds > 0


def test_agents_share_a_long_beginning_and_chats_none() -> None:
    first, second = (request_body("agent", number, 5, "m")["messages"] for number in (0, 1))
    assert first[0] == second[0] and len(first[0]["content"]) > 2000 and first[1] != second[1]
    assert [m["role"] for m in request_body("chat", 0, 5, "m")["messages"]] == ["user"] and WARM == 3
