"""Compares the server with other servers that run here, on the same float32 weights: runs that take turns.

`python -m cortexmlx.bench.studies.peers [MODEL] [--peer NAME=PYTHON ...] [--splits chat agent turns]`

PYTHON is the interpreter of an environment that has the peer installed; mlx-lm needs none. Each server is a
process of its own, started anew for each run, has the machine alone, and multiplies with the same BLAS. Chats are
streamed at temperature 0, so many at once, after three that do not count; an answer without text is a failure.

- `chat`: questions that have nothing in common
- `agent`: questions after a system prompt with tools in common, of about 1,000 tokens
- `turns`: conversations of eight turns, each of which repeats what was said before

Ratios are ours over the peer's, so below 1 is faster: of seconds a token, since answers differ in length, and of the
median time to a first token.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from cortexmlx.cpu import blas

blas.preload()  # before mlx is imported

import mlx.core as mx  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

from cortexmlx.models import load_model  # noqa: E402

WARM, TURNS = 3, 8
PATIENCE = 300.0
"""Seconds that a server may take to start, and a request to its next byte."""
TOPICS = ("rain", "copper", "sails", "chess", "bread", "violins", "tides", "maps", "bees", "glass", "coal", "silk")
OURS = "cortexmlx"
SERVERS = {
    OURS: "cortexmlx serve {model} --port {port} --any-name --log-format none",
    "mlx-lm": "mlx_lm.server --model {model} --port {port}",
    "rapid-mlx": "rapid_mlx.cli serve {model} --port {port}",
    "vllm-mlx": "vllm_mlx.cli serve {model} --port {port} --continuous-batching",
}
"""The module that each server runs as, and its arguments."""
PROGRAM = """
import runpy, sys
sys.path += {path!r}
from cortexmlx.cpu import blas
blas.preload()
if {peer!r}:
    del sys.path[-{count}:]
    for name in [name for name in sys.modules if name.startswith("cortexmlx")]:
        del sys.modules[name]
sys.argv = {arguments!r}
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""
"""What a server's process runs. On Linux MLX's own BLAS is some 70 times slower, so all of them get ours."""


@dataclass
class LoadRun:
    """What the clients measured in one run. Times are in seconds."""

    seconds: float = 0.0
    first_token_times: list[float] = field(default_factory=list)
    tokens: int = 0
    failures: list[str] = field(default_factory=list)


def export_model(model: str, folder: Path) -> None:
    """Write a model with a byte-level tokenizer (GPT-2's kind) as a folder of float32 weights for mlx-lm: on CPUs
    MLX multiplies quantized ones so slowly that nothing else would be measured.
    """
    from tokenizers import decoders

    loaded = load_model(model)
    weights = dict(tree_flatten(loaded.model.parameters()))
    for name, layer in loaded.model.named_modules():
        if hasattr(layer, "scales"):
            codes, scales, biases = (weights.pop(f"{name}.{part}", None) for part in ("weight", "scales", "biases"))
            weights[f"{name}.weight"] = mx.dequantize(
                codes, scales, biases, group_size=layer.group_size, bits=layer.bits
            )
    weights = {name: weight.astype(mx.float32) for name, weight in weights.items()}
    folder.mkdir()
    config = {name: value for name, value in loaded.config.items() if not name.startswith("quantization")}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    core: Any = loaded.tokenizer._core
    core.decoder = decoders.ByteLevel()
    core.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": loaded.tokenizer.eos_token,
        "bos_token": loaded.tokenizer.bos_token,
        "chat_template": loaded.tokenizer.chat_template,
        "model_max_length": loaded.context_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@contextmanager
def run_server(name: str, python: str, folder: Path) -> Iterator[int]:
    """Start a server, yield its port, and stop it when the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = SERVERS[name].format(model=folder, port=port).split()
    path = [entry for entry in (os.getcwd(), *sys.path) if entry]
    program = PROGRAM.format(path=path, peer=name != OURS, count=len(path), arguments=arguments, module=arguments[0])
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [python, "-c", program], stdout=log, stderr=log, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
        try:
            deadline = time.monotonic() + PATIENCE
            while not _is_healthy(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"{name} did not start:\n{log.read()[-2000:]}")
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
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


def opening_messages(split: str, number: int) -> list[dict[str, str]]:
    """Return the messages that a conversation begins with."""
    question = f"Question {number}: what should I know about {TOPICS[number % len(TOPICS)]}, in a few sentences?"
    messages = [{"role": "user", "content": question}]
    if split == "agent":
        parameters = {
            "type": "object",
            "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}, "language": {"type": "string"}},
            "required": ["query"],
        }
        tools = [
            {"name": f"{topic}_lookup", "description": f"Find facts about {topic}.", "parameters": parameters}
            for topic in TOPICS
        ]
        system = f"You are an agent. Answer in one line, or call one of these tools: {json.dumps(tools)}"
        messages.insert(0, {"role": "system", "content": system})
    return messages


def ask(port: int, model: str, messages: list[dict[str, str]], tokens: int, run: LoadRun) -> str:
    """Send a request, record its times or its failure in `run`, and return the answer's text."""
    options = {"stream": True, "temperature": 0, "stream_options": {"include_usage": True}}
    body = json.dumps({"model": model, "messages": messages, "max_tokens": tokens, **options})
    began, first_token_time, completion_tokens, text = time.perf_counter(), 0.0, 0, ""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise OSError(f"status {reply.status}: {reply.read(200)!r}")
        for line in reply:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                completion_tokens = (chunk.get("usage") or {}).get("completion_tokens", completion_tokens)
                for choice in chunk.get("choices") or ():
                    text += choice["delta"].get("content") or ""
                first_token_time = first_token_time or (time.perf_counter() - began if text else 0.0)
        if not completion_tokens or not text:
            raise OSError("status 200 and no text")
    except (OSError, ValueError, http.client.HTTPException) as error:
        run.failures.append(f"{type(error).__name__}: {error}"[:160])
        return ""
    run.first_token_times.append(first_token_time)
    run.tokens += completion_tokens
    return text


def run_load(port: int, model: str, split: str, at_once: int, requests: int, tokens: int) -> LoadRun:
    """Send `requests` requests from `at_once` clients. With split "turns", `TURNS` requests are one conversation."""

    def converse(number: int, run: LoadRun) -> None:
        messages = opening_messages(split, number)
        for turn in range(TURNS if split == "turns" else 1):
            if turn:
                messages.append({"role": "user", "content": f"And what of {TOPICS[(number + turn) % len(TOPICS)]}?"})
            messages.append({"role": "assistant", "content": ask(port, model, messages, tokens, run) or "Nothing."})

    warm, run = LoadRun(), LoadRun()
    for number in range(WARM):
        ask(port, model, opening_messages(split, 1000 + number), tokens, warm)
    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as clients:
        count = max(at_once, requests // TURNS) if split == "turns" else requests
        list(clients.map(lambda number: converse(number, run), range(count)))
    run.seconds = time.perf_counter() - began
    return run


def compare(folder: Path, pythons: dict[str, str], split: str, at_once: int, options: argparse.Namespace) -> None:
    """Run all servers in turns; print each run, and the median ratios of ours to each peer's."""
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in pythons if name != OURS}
    for number in range(options.rounds):
        runs: dict[str, LoadRun] = {}
        for name in pythons if number % 2 == 0 else reversed(pythons):
            with run_server(name, pythons[name], folder) as port:
                run = runs[name] = run_load(port, str(folder), split, at_once, options.requests, options.tokens)
            first = median(run.first_token_times) if run.first_token_times else float("nan")
            print(
                f"{split:6} {at_once:2} {name:14} {run.seconds:7.1f} s, first token {first:6.2f} s, "
                f"{len(run.first_token_times)} answered, {run.tokens:,} tokens, load {os.getloadavg()[0]:.1f} "
                f"{len(run.failures)} failed {run.failures[:1] or ''}",
                flush=True,
            )
        for name, found in ratios.items():
            if runs[OURS].tokens and runs[name].tokens:
                total, first = (
                    runs[OURS].seconds / runs[OURS].tokens * runs[name].tokens / runs[name].seconds,
                    median(runs[OURS].first_token_times) / median(runs[name].first_token_times),
                )
                found.append((total, first))
    for name, found in ratios.items():
        if found:
            total, first = (median(values) for values in zip(*found, strict=True))
            print(
                f"{split:6} {at_once:2} over {name}: seconds a token {total:.2f}, first token {first:.2f}", flush=True
            )


def main() -> None:
    """Run the study for each kind of request and number of clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=f"of {', '.join(SERVERS)}")
    parser.add_argument("--splits", nargs="+", choices=("chat", "agent", "turns"), default=["chat", "agent", "turns"])
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    pythons = {OURS: sys.executable, "mlx-lm": sys.executable}
    for text in options.peer:
        name, _, python = text.partition("=")
        if name not in SERVERS or not Path(python).is_file():
            parser.error(f"--peer {text}: NAME is one of {', '.join(SERVERS)}, and PYTHON a file")
        pythons[name] = python
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        export_model(options.model, folder)
        for split in options.splits:
            for at_once in options.at_once:
                compare(folder, pythons, split, at_once, options)


if __name__ == "__main__":
    main()
