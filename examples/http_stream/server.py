"""Answers as server-sent events, with the standard library alone: `python server.py smollm2 --port 8000`.

POST {"messages": [...]} or {"prompt": "..."}, with "max_tokens", "temperature" and "stop" if you like. Each event is
`data: {"text": ...}`; the last has "finish_reason" and "usage", or "error". A client that goes away has its request
cancelled: found out when it is written to, and while a long prompt is computed, by a comment every second.

A sketch: no authentication, no encryption, one thread per client. It listens on this machine only.
"""

from __future__ import annotations

import argparse
import json
import queue
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cortexmlx import CortexError, Engine, SamplingParams, TokenEvent

MOST_BYTES = 1 << 20
"""Of a request's body."""

SETTINGS = {"max_tokens", "temperature", "stop"}


class Handler(BaseHTTPRequestHandler):
    """One client. Its events wait in its queue, and the engine waits for none."""

    engine: Engine
    quiet_seconds = 1.0

    def do_POST(self) -> None:
        """Ask, and hand on what comes."""
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        try:
            prompt, params = self.asked()
            handle = self.engine.submit(prompt, params, listener=events.put)
        except (CortexError, ValueError, TypeError) as error:
            self.refuse(400, str(error))
            return
        try:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.follow(events)
        except OSError:  # the client is gone
            pass
        finally:
            handle.cancel()

    def asked(self) -> tuple[Any, SamplingParams]:
        """The prompt and how to answer it. Raises ValueError for what is none."""
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 < length <= MOST_BYTES:
            raise ValueError(f"the body has {length} bytes, but must have 1 to {MOST_BYTES}")
        body = json.loads(self.rfile.read(length))
        if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
            raise ValueError('the body must be an object with either "messages" or "prompt"')
        unknown = body.keys() - SETTINGS - {"messages", "prompt"}
        if unknown:
            raise ValueError(f"not known here: {', '.join(sorted(unknown))}")
        return body.get("messages", body.get("prompt")), SamplingParams(**{k: body[k] for k in SETTINGS & body.keys()})

    def follow(self, events: queue.SimpleQueue[TokenEvent]) -> None:
        """Write events until the last."""
        while True:
            try:
                event = events.get(timeout=self.quiet_seconds)
            except queue.Empty:
                self.wfile.write(b":\n\n")
                continue
            if event.text:
                self.write(text=event.text)
            if event.error is not None:
                return self.write(error=str(event.error))
            if event.completion is not None:
                usage = event.completion.usage
                counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
                return self.write(finish_reason=event.completion.finish_reason.value, usage=counts)

    def write(self, **what: Any) -> None:
        """One event."""
        self.wfile.write(f"data: {json.dumps(what)}\n\n".encode())

    def refuse(self, status: int, why: str) -> None:
        """An error instead of events."""
        body = json.dumps({"error": why}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: prompts are nobody's business."""


def serve(engine: Engine, port: int = 0) -> ThreadingHTTPServer:
    """A server that answers with `engine` once `serve_forever` is called. Port 0: one that is free."""
    handler = type("EngineHandler", (Handler,), {"engine": engine})
    return ThreadingHTTPServer(("127.0.0.1", port), handler)


def main() -> None:
    """Until Ctrl-C."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    options.add_argument("model")
    options.add_argument("--port", type=int, default=8000)
    given = options.parse_args()
    with Engine(given.model) as engine, serve(engine, given.port) as server:
        print(f"http://127.0.0.1:{server.server_port}")
        with suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    main()
