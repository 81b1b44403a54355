"""The Python side of a host in another language. It reads lines of JSON from one file descriptor and writes to another.

In:  {"id": 1, "messages": [...], "max_tokens": 200}, {"cancel": 1}; the end of the file closes the engine.
Out: {"ready": "smollm2"}, {"id": 1, "text": "..."}, {"id": 1, "end": "stop"}, {"id": 1, "error": "..."}; an error
without an id is the engine's.

Nothing else crosses the border. Reading and writing release Python's lock, so its holder does not matter.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from cortexmlx import (
    CortexError,
    Engine,
    RequestHandle,
    SamplingParams,
    TokenEvent,
)
from cortexmlx.errors import (
    InvalidRequest,
)


def run(model: str, reads: int, writes: int) -> None:
    """Serve until the input ends. Return when the engine is closed."""
    lock = threading.Lock()
    with os.fdopen(reads, encoding="utf-8") as asked, os.fdopen(writes, "w", encoding="utf-8") as told:

        def tell(**what: Any) -> None:
            with lock:
                told.write(json.dumps(what) + "\n")
                told.flush()

        try:
            with Engine(model) as engine:
                tell(ready=engine.info.name)
                serve(engine, asked, tell)
        except CortexError as error:
            tell(error=str(error))
        except OSError:
            pass  # nobody reads any more


def serve(engine: Engine, asked: TextIO, tell: Callable[..., None]) -> None:
    """Submit questions, cancel requests, and write answers as they come."""
    running: dict[int, RequestHandle] = {}
    for line in asked:
        number = None
        try:
            what = json.loads(line)
            number = what.get("id")
            if "cancel" in what:
                if what["cancel"] in running:
                    running[what["cancel"]].cancel()
                continue
            params = SamplingParams(max_tokens=what.get("max_tokens", 256), temperature=what.get("temperature", 0.7))
            running = {key: handle for key, handle in running.items() if not handle.ended}
            if not isinstance(number, int) or number in running:
                raise InvalidRequest(f"id is {number!r}, but must be an integer that no running request has")
            running[number] = engine.submit(what.get("messages", ()), params, on_event=partial(forward, tell, number))
        except (CortexError, ValueError, AttributeError) as error:
            tell(id=number, error=str(error))


def forward(tell: Callable[..., None], number: int, event: TokenEvent) -> None:
    """One event of an answer."""
    if event.text:
        tell(id=number, text=event.text)
    if event.error is not None:
        tell(id=number, error=str(event.error))
    elif event.completion is not None:
        tell(id=number, end=event.completion.finish_reason.value)
