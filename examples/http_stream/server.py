"""The OpenAI API's completions, with the standard library alone: `python server.py smollm2 --port 8000`.

POST /v1/chat/completions or /v1/completions, with `"stream": true` for a stream. If the client goes away, its request
is cancelled. Writing to the client detects that; during a long prompt, a comment is written every second.

A sketch: no authentication, no encryption, one thread per client. It listens on this machine only.
"""

from __future__ import annotations

import argparse
import json
import queue
import time
import uuid
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cortexmlx import (
    ChatPrompt,
    CortexError,
    Engine,
    RequestHandle,
    SamplingParams,
    TokenEvent,
)
from cortexmlx.errors import (
    InvalidRequest,
)
from cortexmlx.protocols.openai import chat_completions, completions
from cortexmlx.protocols.openai.errors import error_body, is_client_error
from cortexmlx.protocols.request import ReplyInfo, Request, RequestDefaults

MAX_BYTES = 1 << 20
"""Of a request's body."""

PROTOCOLS = {
    chat_completions.URL: (chat_completions, chat_completions.ChatChunks),
    completions.URL: (completions, completions.CompletionChunks),
}
"""Each path with its module, and with the class of its stream."""

Events = queue.SimpleQueue[tuple[int, TokenEvent]]
"""Events, each with the number of its prompt."""


class Handler(BaseHTTPRequestHandler):
    """One client. Its events wait in its queue, and the engine waits for none."""

    engine: Engine
    quiet_seconds = 1.0

    def do_POST(self) -> None:
        """Ask, and reply."""
        handles: list[RequestHandle] = []
        events: Events = queue.SimpleQueue()
        try:
            if self.path not in PROTOCOLS:
                raise InvalidRequest(f"{self.path} is not served, only {' and '.join(PROTOCOLS)}")
            protocol, chunks = PROTOCOLS[self.path]
            request: Request = protocol.read(self.body(), RequestDefaults(SamplingParams()))
            self.submit(request, handles, events)
            info = ReplyInfo(uuid.uuid4().hex, self.engine.info.name, int(time.time()), self.engine.token_bytes)
            if request.stream:
                self.stream(events, chunks(request, info), len(handles))
            else:
                whole = [handle.result() for handle in handles]
                self.reply(200, protocol.write(request, [(answer, *answer.others) for answer in whole], info))
        except CortexError as error:
            self.reply(400 if is_client_error(error) else 500, error_body(error))
        except OSError:  # the client is gone
            pass
        finally:
            for handle in handles:
                handle.cancel()

    def body(self) -> dict[str, Any]:
        """The JSON object that was sent. Raises InvalidRequest."""
        length = self.headers.get("Content-Length") or "0"
        if not length.isdecimal() or not 0 < int(length) <= MAX_BYTES:
            raise InvalidRequest(f"the body has {length:.20} bytes, but must have 1 to {MAX_BYTES}")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the body is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise InvalidRequest("the body must be a JSON object")
        return body

    def submit(self, request: Request, handles: list[RequestHandle], events: Events) -> None:
        """Ask the engine each prompt."""
        for number, asked in enumerate(request.prompts):

            def listener(event: TokenEvent, number: int = number) -> None:
                events.put((number, event))

            prompt: Any = asked
            if not request.raw:
                prompt = ChatPrompt(prompt, request.template_vars)
            handles.append(self.engine.submit(prompt, request.params, listener=listener))

    def stream(self, events: Events, chunks: Any, prompts: int) -> None:
        """Write events until the last one of each prompt, or the first error."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        while prompts:
            try:
                number, event = events.get(timeout=self.quiet_seconds)
            except queue.Empty:
                self.wfile.write(b":\n\n")
                continue
            for chunk in chunks.convert(event, number):
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            if event.error is not None:
                return
            prompts -= event.completion is not None
        self.wfile.write(b"data: [DONE]\n\n")

    def reply(self, status: int, content: dict[str, Any]) -> None:
        """A whole body."""
        body = json.dumps(content).encode()
        with suppress(OSError):  # the client is gone
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: prompts are private."""


def serve(engine: Engine, port: int = 0) -> ThreadingHTTPServer:
    """Return a server that answers with `engine` after `serve_forever` is called. Port 0: any free port."""
    handler = type("EngineHandler", (Handler,), {"engine": engine})
    return ThreadingHTTPServer(("127.0.0.1", port), handler)


def main() -> None:
    """Serve until Ctrl-C."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    options.add_argument("model")
    options.add_argument("--port", type=int, default=8000)
    given = options.parse_args()
    try:
        with Engine(given.model) as engine, serve(engine, given.port) as server:
            print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
            server.serve_forever()
    except KeyboardInterrupt:
        pass
    except (CortexError, OSError, OverflowError) as error:  # no such model; the port is taken, or none
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
