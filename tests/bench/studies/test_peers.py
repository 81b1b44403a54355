"""The study of servers side by side: what counts as an answer, and what a conversation of eight turns repeats."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cortexmlx.bench.studies.peers import TURNS, WARM, run_load

BODIES: list[dict[str, Any]] = []


class Scripted(BaseHTTPRequestHandler):
    """Answers with the number of the question, with nothing to questions 3, and with an error to 4."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        BODIES.append(body)
        number = body["messages"][-1]["content"].partition(":")[0]
        self.send_response(503 if number.endswith(" 4") else 200)
        self.end_headers()
        chunks = [{"choices": [{"delta": {"role": "assistant"}}]}, {"choices": [{"delta": {"content": number}}]}]
        usage = {"choices": [], "usage": {"completion_tokens": 5}}
        for chunk in [chunks[0], usage] if number.endswith(" 3") else [*chunks, usage]:
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@pytest.fixture
def port() -> Iterator[int]:
    BODIES.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_an_answer_without_text_or_with_an_error_is_a_failure(port: int) -> None:
    run = run_load(port, "m", "agent", 2, 6, 9)
    assert (len(run.first_token_times), run.tokens, len(BODIES)) == (4, 20, 6 + WARM)
    assert sorted(failure.partition(":")[2][:11] for failure in run.failures) == [" status 200", " status 503"]
    assert len({body["messages"][0]["content"] for body in BODIES}) == 1 and {len(b["messages"]) for b in BODIES} == {2}


def test_each_turn_repeats_what_was_said(port: int) -> None:
    assert len(run_load(port, "m", "turns", 1, TURNS, 9).first_token_times) == TURNS
    conversation = [body["messages"] for body in BODIES[WARM:]]
    assert [len(messages) for messages in conversation] == [2 * turn + 1 for turn in range(TURNS)]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(conversation))
