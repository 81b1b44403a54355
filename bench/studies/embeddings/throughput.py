"""Texts per second of `Engine.embed`, beside mlx-lm's model called with padded batches: `python -m
cortexmlx.bench.studies.embeddings [--texts N] [--rounds N] [--batch N] [--words N] [--model FOLDER]`.

The texts are ragged: their lengths are log-normal. They are embedded without an instruction, and with one before each.
mlx-lm's class computes `model.model(batch)`, filled up to the longest text of each batch, in the order of the texts and
sorted by length. Its last states are then picked and normalized, as here. Both sides have the same float32 weights and
the same tokens. The vectors are compared. The sides take turns, so that the machine's other work affects all of them;
CPU time counts all threads of the process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortexmlx.cpu import blas

blas.preload()  # before mlx is imported

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from cortexmlx import Engine  # noqa: E402
from cortexmlx.bench.studies.embeddings.model_folder import write_model  # noqa: E402
from cortexmlx.mlx_lm.package import mlx_lm_utils  # noqa: E402

INSTRUCTION = (
    "Instruct: Given a question of a reader of technical documentation, retrieve the passages of the handbook that "
    "answer it, prefer those that name the version of the program, and leave out what is only about other programs\n"
    "Query:"
)
"""As long as instructions of one's own often are: some 40 tokens."""

WORDS = [
    "the",
    "engine",
    "keeps",
    "a",
    "cache",
    "of",
    "blocks",
    "and",
    "reads",
    "each",
    "weight",
    "once",
    "while",
    "it",
    "waits",
    "for",
    "the",
    "next",
    "step",
    "of",
    "a",
    "batch",
]


@dataclass(frozen=True)
class Seconds:
    """Wall time, and CPU time of all threads."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Result:
    """The seconds of each side, in the order of the rounds, and how far its vectors are from those of the engine."""

    seconds: dict[str, list[Seconds]]
    distances: dict[str, float]
    tokens: int
    cached: int
    """Those of the engine's tokens that were found in its cache, in the last round."""


def ragged_texts(count: int, words: int, seed: int = 0) -> list[str]:
    """Return texts of log-normal lengths, `words` words in the median."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(words), 0.8, count), 2, 400).astype(int)
    return [" ".join(rng.choice(WORDS, length)) for length in lengths]


def padded(model: Any, tokens: Sequence[Sequence[int]], batch: int, by_length: bool) -> np.ndarray:
    """Return the normalized last states of texts, computed in batches that are filled up to the longest text."""
    order = sorted(range(len(tokens)), key=lambda i: -len(tokens[i])) if by_length else list(range(len(tokens)))
    vectors: dict[int, np.ndarray] = {}
    for first in range(0, len(order), batch):
        some = order[first : first + batch]
        longest = max(len(tokens[i]) for i in some)
        filled = mx.array([[*tokens[i], *[0] * (longest - len(tokens[i]))] for i in some])
        states = model.model(filled)[mx.arange(len(some)), mx.array([len(tokens[i]) - 1 for i in some])]
        found = np.array(states.astype(mx.float32))
        vectors |= dict(zip(some, found / np.linalg.norm(found, axis=1, keepdims=True), strict=True))
    return np.stack([vectors[i] for i in range(len(tokens))])


def measure(folder: Path, texts: Sequence[str], rounds: int, batch: int, prompt: str | None) -> Result:
    """Embed the texts `rounds` times with each side, in turns."""
    model, _ = mlx_lm_utils().load_model(folder)
    with Engine(folder, kv_store=None) as engine:
        assert engine.info.embedding is not None
        before = engine.info.embedding.prompts[prompt] if prompt else ""
        tokens = [engine.encode((before + text).strip()) for text in texts]
        sides: dict[str, Callable[[], np.ndarray]] = {
            "cortexmlx": lambda: engine.embed(texts, prompt=prompt).vectors,
            f"padded, {batch} a batch": lambda: padded(model, tokens, batch, by_length=False),
            f"padded, {batch} a batch, by length": lambda: padded(model, tokens, batch, by_length=True),
        }
        right = sides["cortexmlx"]()
        seconds: dict[str, list[Seconds]] = {name: [] for name in sides}
        distances = dict.fromkeys(sides, 0.0)
        for number in range(rounds):
            for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
                wall, cpu = time.perf_counter(), time.process_time()
                vectors = sides[name]()
                seconds[name].append(Seconds(time.perf_counter() - wall, time.process_time() - cpu))
                distances[name] = max(distances[name], float(np.linalg.norm(vectors - right, axis=1).max()))
        cached = sum(engine.embed(texts, prompt=prompt).cached_tokens)
    return Result(seconds, distances, sum(map(len, tokens)), cached)


def table(result: Result, count: int) -> str:
    """Return a line for each side: texts per second, and how much faster the engine is, by wall and by CPU time."""
    mine = result.seconds["cortexmlx"]
    lines = [f"{count} texts, {result.tokens} tokens, of which the engine finds {result.cached} cached"]
    lines.append(f"{'':<32}{'texts/s':>9}{'engine: wall':>14}{'CPU':>8}{'distance':>10}")
    for name, seconds in result.seconds.items():
        rate = count / statistics.median(each.wall for each in seconds)
        pairs = list(zip(seconds, mine, strict=True))
        wall = statistics.median(other.wall / own.wall for other, own in pairs)
        cpu = statistics.median(other.cpu / own.cpu for other, own in pairs)
        lines.append(f"{name:<32}{rate:>9.1f}{wall:>13.2f}x{cpu:>7.2f}x{result.distances[name]:>10.1e}")
    return "\n".join(lines)


def main() -> None:
    """Measure without and with an instruction, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--words", type=int, default=16, help="words of a text in the median")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--model", type=Path, help="an embedding model's folder with a prompt 'query'")
    asked = parser.parse_args()
    texts = ragged_texts(asked.texts, asked.words)
    with tempfile.TemporaryDirectory() as empty:
        folder = asked.model or write_model(Path(empty) / "smollm2", {"query": INSTRUCTION})
        for title, prompt in (("without an instruction", None), ("with an instruction", "query")):
            print(f"{title}: {table(measure(folder, texts, asked.rounds, asked.batch, prompt), asked.texts)}\n")
