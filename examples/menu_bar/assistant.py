"""The part of the menu-bar app that needs no macOS. The tests run it on Linux.

One thread opens the engine and asks it. The menu reads `view` ten times per second on the main thread. So no other
thread touches the user interface.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from cortexmlx import (
    CortexError,
    Engine,
    Reply,
    SamplingParams,
)
from cortexmlx.stats import (
    MemoryPressure,
)

SYSTEM = "You are a helpful assistant. Answer in a few sentences."
PARAMS = SamplingParams(max_tokens=400, temperature=0.7, top_p=0.9)


@dataclass(frozen=True)
class View:
    """What the menu shows: a line of `status`, the `answer` so far, and whether the engine is `busy`."""

    status: str
    answer: str = ""
    busy: bool = False


class Assistant:
    """A model that answers one question at a time. Any thread may call its methods. All but `close` return at once."""

    def __init__(self, model: str | Path, kv_memory: int | str | None = None) -> None:
        self.view = View(f"Loading {model} ...", busy=True)
        self._model = model
        self._kv_memory = kv_memory
        self._questions: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._reply: Reply | None = None
        self._stopped = self._closed = False
        self._thread = threading.Thread(target=self._run, name="assistant", daemon=True)

    def start(self) -> None:
        """Load the model."""
        self._thread.start()

    def ask(self, question: str) -> None:
        """Ask after the questions before it are answered."""
        self._questions.put(question)

    def stop(self) -> None:
        """Stop the answer, and keep its text so far."""
        self._stopped = True
        reply = self._reply
        if reply is not None:
            reply.cancel()

    def memory_is_short(self, level: MemoryPressure) -> None:
        """Pass on the system's memory warning. It waits for a step, so do not call it on the main thread."""
        engine = self._engine
        if engine is not None:
            engine.on_memory_pressure(level)

    def close(self) -> None:
        """Stop, answer no further question, and give the memory back."""
        self._closed = True
        self._questions.put(None)
        self.stop()
        self._thread.join(5)

    def _run(self) -> None:
        try:
            with Engine(self._model, kv_memory=self._kv_memory) as engine:
                self._engine = engine
                talk = engine.conversation(system=SYSTEM, params=PARAMS)
                self.view = View(f"{engine.info.name} is ready")
                while (question := self._questions.get()) is not None and not self._closed:
                    self._stopped = self._closed
                    self.view = View("Reading ...", busy=True)
                    try:
                        with talk.stream(question) as self._reply:
                            self._follow(self._reply)
                    except CortexError as error:  # the conversation is as it was: ask something else
                        self.view = replace(self.view, status=str(error), busy=False)
                    self._reply = None
        except CortexError as error:
            self.view = View(f"{error}")
        self._engine = None

    def _follow(self, reply: Reply) -> None:
        text = ""
        for event in reply:
            if self._stopped:
                reply.cancel()
            text += event.text
            self.view = View("Writing ...", text, busy=True)
            if event.completion is not None:
                speed = event.completion.timings.decode_tokens_per_second
                said = f"{event.completion.usage.completion_tokens} tokens, {speed:.0f} per second"
                self.view = View(f"Stopped after {said}" if self._stopped else said, text)
