"""What streams cost the server's process: answers at a hundred steps a second, of an engine that computes nothing.

    python -m cortexmlx.bench.studies.serving.streams [--streams 16] [--rate 100] [--seconds 10] [--profile]

The engine is a stub whose thread hands each stream an event at each step, as the real one does. The readers are another
process. The figure is the CPU time of the server's process, less that of the stub alone, as a part of one core.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from cortexmlx.request import Completion, FinishReason, Timings, TokenEvent, Usage
from cortexmlx.server import app
from cortexmlx.server.web.listening import Listening, bound

READER = r"""
import http.client, sys, threading
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def read():
    web = http.client.HTTPConnection(host, port)
    web.request("POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "stream": true}')
    reply = web.getresponse()
    events = 0
    while line := reply.readline():
        events += line.startswith(b"data: {")
    sys.stdout.write(f"{events}\n")
threads = [threading.Thread(target=read) for _ in range(count)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


class StubEngine:
    """Answers every prompt with the same word at each step."""

    def __init__(self, rate: float) -> None:
        self.info = SimpleNamespace(name="stub", identity="stub", template_vars=())
        self.longest_request = 1 << 20
        self.steps = 0
        self._rate = rate
        self._listeners: list[Callable[[TokenEvent], None]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def asked(self) -> int:
        """How many streams there are."""
        return len(self._listeners)

    def submit(self, prompt: object, params: object, *, listener: Callable[[TokenEvent], None], **options: Any) -> Any:
        """Begin a stream."""
        self._listeners.append(listener)
        return SimpleNamespace(cancel=lambda: None, progress=None)

    def token_bytes(self, token: int) -> bytes:
        """Return a word."""
        return b"word"

    def end(self) -> None:
        """End all streams."""
        self._ended.set()
        self._thread.join()
        usage, timings = Usage(1, self.steps), Timings(0.0, 0.0, 0.0, 0.0, 0.0)
        done = Completion(" word" * self.steps, (1,) * self.steps, FinishReason.STOP, usage, timings)
        for listener in self._listeners:
            listener(TokenEvent("", finish_reason=FinishReason.STOP))
            listener(TokenEvent("", completion=done))

    def _run(self) -> None:
        at = time.perf_counter()
        while not self._ended.wait(max(0.0, at - time.perf_counter())):
            at += 1 / self._rate
            self.steps += bool(self._listeners)
            for listener in list(self._listeners):
                listener(TokenEvent(" word", token_id=1))


@contextmanager
def serving(engine: StubEngine, profile: cProfile.Profile | None = None) -> Iterator[str]:
    """Serve a stub; yields its address. `profile` profiles the loop's thread."""
    listening = Listening(app(engine), bound("127.0.0.1", 0))  # type: ignore[arg-type]
    run = listening.run if profile is None else partial(profile.runcall, listening.run)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield listening.url
    finally:
        listening.stop()
        thread.join()


def measured(streams: int, rate: float, seconds: float, profile: cProfile.Profile | None = None) -> dict[str, float]:
    """Return the steps per second, the CPU seconds per second of the server's process without the stub's, and the CPU
    microseconds for an event.
    """
    alone = StubEngine(rate)
    for _ in range(streams):
        alone.submit("", None, listener=lambda event: None)
    stub = _cpu(seconds)
    alone.end()
    engine = StubEngine(rate)
    with serving(engine, profile) as url:
        host, port = url.removeprefix("http://").split(":")
        command = [sys.executable, "-c", READER, host, port, str(streams)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as readers:
            while engine.asked < streams:
                time.sleep(0.01)
            before = engine.steps
            used = _cpu(seconds)
            steps = engine.steps - before
            engine.end()
            assert readers.stdout is not None
            read = [int(line) for line in readers.stdout]
    assert len(read) == streams and min(read) >= steps, "a stream has lost events"
    share = used - stub
    return {
        "steps_per_second": steps / seconds,
        "core": share,
        "us_per_event": share / (steps * streams / seconds) * 1e6,
    }


def _cpu(seconds: float) -> float:
    began = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - began) / seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    profiled = cProfile.Profile() if asked.profile else None
    figures = measured(asked.streams, asked.rate, asked.seconds, profiled)
    if profiled is not None:
        pstats.Stats(profiled).sort_stats("tottime").print_stats(25)
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))
