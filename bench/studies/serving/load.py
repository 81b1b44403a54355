"""Compares the server under load with mlx_lm.server, on the same float32 weights: pairs of runs that take turns.

python -m cortexmlx.bench.studies.serving.load [MODEL] [--requests 32] [--pairs 3] [--at-once 1 8 16]
                                                   [--splits chat agent] [--tokens 48] [--alone]

The way of measuring is SiliconBench's: streamed chat completions, temperature 0, `include_usage`, so many at once, and
three requests before that do not count. An answer without tokens is a failure. Questions differ; those of `agent` have
a system prompt with tools in common, of about 1,000 tokens. Each server is a process of its own, started anew for each
run, has the machine alone, and multiplies with the same BLAS. Ratios are ours over mlx_lm.server's: below 1 is faster.
With `--alone`, the server runs beside its own engine, without HTTP, in place of mlx_lm.server.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from cortexmlx.bench.studies.serving.exported import export_model

WARM = 3
STARTS = 300.0
"""Seconds that a server may take to start, and a request to say its next word."""

PEER = """
from cortexmlx.cpu import blas
blas.preload()
import runpy
runpy.run_module("mlx_lm.server", run_name="__main__")
"""
"""The program of mlx_lm.server. On Linux it gets the same fast BLAS; its own is some 70 times slower."""

TOPICS = ("rain", "copper", "sails", "chess", "bread", "violins", "tides", "maps", "bees", "glass", "coal", "silk")


@dataclass
class LoadRun:
    """What the clients measured in one run. All times are in seconds."""

    seconds: float = 0.0
    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Between two events of a stream that have text."""
    tokens: int = 0
    cached: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def answered_count(self) -> int:
        """The number of requests that got an answer."""
        return len(self.ttft)


def request_body(split: str, number: int, tokens: int, model: str) -> dict[str, Any]:
    """Return the JSON body of request `number`: a chat question, or, of the split "agent", one with tools."""
    question = f"Question {number}: what should I know about {TOPICS[number % len(TOPICS)]}, in a few sentences?"
    messages = [{"role": "user", "content": question}]
    if split == "agent":
        tools = [
            {"name": f"{topic}_lookup", "description": f"Find facts about {topic}.", "parameters": PARAMETERS}
            for topic in TOPICS
        ]
        system_prompt = f"You are an agent. Answer in one line, or call one of these tools: {json.dumps(tools)}"
        messages.insert(0, {"role": "system", "content": system_prompt})
    options = {"stream": True, "temperature": 0, "stream_options": {"include_usage": True}}
    return {"model": model, "messages": messages, "max_tokens": tokens, **options}


PARAMETERS = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}, "language": {"type": "string"}},
    "required": ["query"],
}


def send_request(port: int, body: dict[str, Any], run: LoadRun | None) -> None:
    """Send a request to the server, and record its times or its failure in `run`."""
    start_time, last_time, completion_tokens, ttft, gaps = time.perf_counter(), 0.0, 0, 0.0, []
    cached = 0
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=STARTS)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise OSError(f"status {reply.status}: {reply.read(200)!r}")
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or {}
            completion_tokens = usage.get("completion_tokens", completion_tokens)
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or cached
            if any(choice["delta"].get("content") for choice in chunk.get("choices") or ()):
                now = time.perf_counter()
                if last_time:
                    gaps.append(now - last_time)
                else:
                    ttft = now - start_time
                last_time = now
        connection.close()
        if not completion_tokens or not last_time:
            raise OSError("status 200 and no tokens")
    except (OSError, ValueError, http.client.HTTPException) as error:
        if run is not None:
            run.failures.append(f"{type(error).__name__}: {error}"[:120])
        return
    if run is not None:
        run.ttft.append(ttft)
        run.gaps += gaps
        run.tokens += completion_tokens
        run.cached += cached


def run_load(port: int, split: str, at_once: int, requests: int, tokens: int, model: str) -> LoadRun:
    """Send all requests with `at_once` clients, and return what they measured."""
    for number in range(WARM):
        send_request(port, request_body(split, 1000 + number, tokens, model), None)
    run = LoadRun()
    start_time = time.perf_counter()
    with ThreadPoolExecutor(at_once) as clients:
        list(
            clients.map(
                lambda number: send_request(port, request_body(split, number, tokens, model), run), range(requests)
            )
        )
    run.seconds = time.perf_counter() - start_time
    return run


@contextmanager
def run_server(name: str, folder: Path) -> Iterator[int]:
    """Start a server, yield its port, and stop it when the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if name == "cortexmlx":
        command = ["-m", "cortexmlx", "serve", str(folder), "--port", str(port), "--any-name", "--log-format", "none"]
    else:
        command = ["-c", PEER, "--model", str(folder), "--port", str(port)]
    log = folder / f"{name}.log"
    with log.open("wb") as log_file:
        process = subprocess.Popen([sys.executable, *command], stdout=log_file, stderr=log_file)
        try:
            deadline = time.monotonic() + STARTS
            while not _is_healthy(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{name} did not start:\n{log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_healthy(port: int) -> bool:
    """Return whether the server answers at /health."""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


def format_percentiles(values: Sequence[float]) -> str:
    """Return p50, p90 and p99 as text, in milliseconds."""
    sorted_values = sorted(values) or [float("nan")]
    return " / ".join(
        f"{sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * p))] * 1e3:,.0f}"
        for p in (0.5, 0.9, 0.99)
    )


def compare_servers(folder: Path, split: str, at_once: int, requests: int, pairs: int, tokens: int) -> None:
    """Run both servers at one concurrency in pairs; print the runs and the median ratios."""
    totals, firsts = [], []
    for pair in range(pairs):
        order = ("cortexmlx", "mlx_lm.server") if pair % 2 == 0 else ("mlx_lm.server", "cortexmlx")
        runs = {}
        for name in order:
            with run_server(name, folder) as port:
                run = runs[name] = run_load(port, split, at_once, requests, tokens, str(folder))
            print(
                f"{split} {at_once:2} {name:14} {run.seconds:7.1f} s  TTFT {format_percentiles(run.ttft)} ms  "
                f"ITL {format_percentiles(run.gaps)} ms  {run.answered_count}/{requests} done, {run.tokens:,} tokens, "
                f"{run.cached:,} cached, load {os.getloadavg()[0]:.1f}  {run.failures[:1] or ''}",
                flush=True,
            )
        our_run, their_run = runs["cortexmlx"], runs["mlx_lm.server"]
        if our_run.ttft and their_run.ttft:
            totals.append(our_run.seconds / our_run.tokens / (their_run.seconds / their_run.tokens))
            firsts.append(median(our_run.ttft) / median(their_run.ttft))
    if totals:
        print(f"{split} {at_once:2} ratios: seconds a token {median(totals):.2f}, TTFT p50 {median(firsts):.2f}")


def seconds_without_http(folder: Path, split: str, at_once: int, requests: int, tokens: int) -> float:
    """Return the seconds per token of the same requests to an engine, without HTTP."""
    from cortexmlx import Engine, SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    conversations = [
        request_body(split, number, tokens, "")["messages"] for number in (*range(1000, 1000 + WARM), *range(requests))
    ]
    with Engine(str(folder)) as engine, ThreadPoolExecutor(at_once) as clients:

        def made(messages: Any) -> int:
            return engine.generate(messages, params).usage.completion_tokens

        for messages in conversations[:WARM]:
            made(messages)
        start_time = time.perf_counter()
        token_count = sum(clients.map(made, conversations[WARM:]))
        return (time.perf_counter() - start_time) / token_count


def compare_with_engine(folder: Path, split: str, at_once: int, requests: int, pairs: int, tokens: int) -> None:
    """Run the server and its engine without HTTP in pairs; print the pairs and the median ratio."""

    def served() -> float:
        with run_server("cortexmlx", folder) as port:
            run = run_load(port, split, at_once, requests, tokens, str(folder))
        return run.seconds / run.tokens

    def by_itself() -> float:
        return seconds_without_http(folder, split, at_once, requests, tokens)

    ratios = []
    for pair in range(pairs):
        if pair % 2 == 0:
            served_seconds, engine_seconds = served(), by_itself()
        else:
            engine_seconds, served_seconds = by_itself(), served()
        ratios.append(served_seconds / engine_seconds)
        print(
            f"{split} {at_once:2} ms a token: served {served_seconds * 1e3:.1f}, engine alone "
            f"{engine_seconds * 1e3:.1f}",
            flush=True,
        )
    print(f"{split} {at_once:2} ratio: served over engine alone {median(ratios):.3f}", flush=True)


def main() -> None:
    """Run the study for each kind of request and concurrency."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--splits", nargs="+", choices=("chat", "agent"), default=["chat", "agent"])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary_folder:
        folder = export_model(options.model, Path(temporary_folder) / "model")
        for split in options.splits:
            for at_once in options.at_once:
                compare = compare_with_engine if options.alone else compare_servers
                compare(folder, split, at_once, options.requests, options.pairs, options.tokens)


if __name__ == "__main__":
    main()
