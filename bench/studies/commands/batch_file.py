"""The cost of a batch file, compared with its engine alone:

    python -m cortexmlx.bench.studies.commands.batch_file [MODEL] [--pairs N]

`cortexmlx batch` reads the requests of a file, and writes, syncs and orders the records. The engine alone has the same
prompts in memory, and drops the answers. Each runs in its own process, in pairs that take turns to go first.

Two figures are compared. One is tokens per second from the first request to the last record, without loading. The other
is tokens per second of CPU time of the whole process, which is more reliable on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cortexmlx import CortexError, Engine, SamplingParams
from cortexmlx.bench.measure.pairs import MINIMUM_PAIRS

ROWS = 16
_COMMAND = [sys.executable, "-c", "from cortexmlx.cli import main; main()", "batch"]
_ALONE = [sys.executable, "-m", "cortexmlx.bench.studies.commands.batch_file", "--alone"]
_REPORT = re.compile(r"(\d+) tokens in [\d.]+ s, ([\d.]+) tok/s")


@dataclass(frozen=True)
class Rate:
    """Tokens, and tokens per second of wall time and of CPU time."""

    tokens: int
    wall: float
    cpu: float


def write_requests(path: Path, count: int, tokens: int) -> None:
    """Write `count` requests for completions of `tokens` tokens, with prompts that begin differently."""
    with path.open("w") as file:
        for i in range(count):
            body = {"prompt": f"{i} is the number of this text, and it goes on:", "max_tokens": tokens}
            line = {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps({**line, "body": {**body, "ignore_eos": True, "temperature": 0}}) + "\n")


def alone(model: str, requests: Path) -> tuple[int, float]:
    """Return the tokens and seconds of the engine that answers prompts in memory."""
    bodies = [json.loads(line)["body"] for line in requests.read_text().splitlines()]
    prompts = [body.pop("prompt") for body in bodies]
    params = [SamplingParams(**body) for body in bodies]
    tokens = 0
    with Engine(model, max_rows=ROWS) as engine:
        started = time.monotonic()
        for _, result in engine.as_completed(iter(prompts), iter(params)):
            if isinstance(result, CortexError):
                raise result
            tokens += len(result.token_ids)
        return tokens, time.monotonic() - started


def rate(command: Sequence[str]) -> Rate:
    """Return the tokens and the rate that a command reports, and its rate by CPU time."""
    before = _cpu_of_children()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    found = _REPORT.search(done.stderr)
    if done.returncode or found is None:
        raise RuntimeError(f"{command[-1]} ended with {done.returncode}: {done.stderr}")
    tokens = int(found[1])
    return Rate(tokens, float(found[2]), tokens / (_cpu_of_children() - before))


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compare(model: str, pairs: int, count: int, tokens: int) -> list[tuple[Rate, Rate]]:
    """Return the rates of the file and of the engine alone, pair by pair."""
    rates: list[tuple[Rate, Rate]] = []
    with tempfile.TemporaryDirectory(prefix="cortexmlx-bench-") as folder:
        requests = Path(folder) / "in.jsonl"
        write_requests(requests, count, tokens)
        options = ["--no-kv-store", "--max-rows", str(ROWS), "--force", "-o", f"{folder}/out.jsonl"]
        file, engine = [*_COMMAND, model, str(requests), *options], [*_ALONE, model, str(requests)]
        for pair in range(pairs):
            sides = [file, engine] if pair % 2 == 0 else [engine, file]
            first, second = [rate(side) for side in sides]
            assert first.tokens == second.tokens == count * tokens, "both sides answer all of it"
            rates.append((first, second) if pair % 2 == 0 else (second, first))
            print(f"pair {pair + 1}: file {rates[-1][0]}, engine alone {rates[-1][1]}", file=sys.stderr)
    return rates


def main() -> None:
    """Print the median of the ratios."""
    parser = argparse.ArgumentParser(
        prog="python -m cortexmlx.bench.studies.commands.batch_file", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("requests", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--pairs", type=int, default=MINIMUM_PAIRS)
    parser.add_argument("--count", type=int, default=64, help="requests")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    asked = parser.parse_args()
    if asked.alone:
        tokens, seconds = alone(asked.model, asked.requests)
        print(f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tok/s", file=sys.stderr)
        return
    rates = compare(asked.model, asked.pairs, asked.count, asked.tokens)
    for what, name in (("second", "wall"), ("second of CPU time", "cpu")):
        both = [(getattr(file, name), getattr(engine, name)) for file, engine in rates]
        file, engine = (statistics.median(side) for side in zip(*both, strict=True))
        ratio = statistics.median(a / b for a, b in both)
        print(
            f"tokens per {what}: file {file:.1f}, engine alone {engine:.1f}, median of {len(both)} ratios {ratio:.3f}"
        )


if __name__ == "__main__":
    main()
