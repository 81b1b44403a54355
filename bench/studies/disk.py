"""The cost of disk writes for requests served meanwhile: `python -m cortexmlx.bench.studies.disk [MODEL]`.

One engine with a store answers random prompts. Batches that are kept, and so written to disk, take turns with batches
that are not (`cache=False`). No prompt is repeated, so everything is computed. Two engines cannot be compared: the
places of their weights in memory make as much of a difference.

Three figures are compared: wall time, CPU time of the process with its writing thread, and the longest time between two
tokens of a row.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from cortexmlx import Engine, SamplingParams, StoreState, TokenEvent
from cortexmlx.bench.measure.pairs import MINIMUM_PAIRS

SETTLE_SECONDS = 1.0
"""Time after the answers, in which their writes end: its CPU time counts."""


class Took(NamedTuple):
    """The cost of a batch of answers."""

    wall: float
    """Seconds of wall time."""
    cpu: float
    """Seconds of CPU time."""
    gap: float
    """The longest time between two tokens of a row, in seconds."""
    tokens: int
    """Tokens of the answers."""


def answer(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, keep: bool) -> Took:
    """Answer all prompts at once with `tokens` tokens each. `keep` says whether their keys and values are kept."""
    times: list[list[float]] = [[] for _ in prompts]

    def note(row: list[float]) -> Callable[[TokenEvent], None]:
        return lambda event: None if event.token_id is None else row.append(time.perf_counter())

    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    began, cpu = time.perf_counter(), time.process_time()
    handles = [
        engine.submit(prompt, params, listener=note(row), cache=keep)
        for prompt, row in zip(prompts, times, strict=True)
    ]
    for handle in handles:
        handle.result()
    wall = time.perf_counter() - began
    time.sleep(SETTLE_SECONDS)
    gap = max((b - a for row in times for a, b in pairwise(row)), default=0.0)
    return Took(wall, time.process_time() - cpu, gap, sum(map(len, times)))


def compare(model: str, pairs: int, rows: int, prompt: int, tokens: int) -> tuple[list[tuple[Took, Took]], int]:
    """Return the costs of kept and not kept answers, pair by pair, and how many blocks were written."""
    source = random.Random(0)
    found: list[tuple[Took, Took]] = []
    with (
        tempfile.TemporaryDirectory(prefix="cortexmlx-bench-") as folder,
        Engine(model, max_rows=rows, kv_store=folder) as engine,
    ):
        while (store := engine.stats().kv_store) is not None and store.state is StoreState.HASHING:
            time.sleep(0.05)
        for pair in range(-1, pairs):  # the first one warms up
            took = {}
            for keep in (True, False) if pair % 2 else (False, True):
                prompts = [[source.randrange(engine.info.vocab_size) for _ in range(prompt)] for _ in range(rows)]
                took[keep] = answer(engine, prompts, tokens, keep)
            if pair >= 0:
                found.append((took[True], took[False]))
        store = engine.stats().kv_store
        assert store is not None
        return found, store.stored_blocks


def main() -> None:
    """Print the medians of the ratios."""
    parser = argparse.ArgumentParser(
        prog="python -m cortexmlx.bench.studies.disk", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--pairs", type=int, default=MINIMUM_PAIRS)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=300, help="tokens")
    parser.add_argument("--tokens", type=int, default=100, help="of each answer")
    asked = parser.parse_args()
    found, blocks = compare(asked.model, asked.pairs, asked.rows, asked.prompt, asked.tokens)
    print(f"kept over not kept, {len(found)} pairs, {blocks} blocks written:")
    for what, name in (("wall time", "wall"), ("CPU time", "cpu"), ("longest gap between tokens", "gap")):
        ratios = sorted(getattr(kept, name) / getattr(plain, name) for kept, plain in found)
        print(f"  {what:<27}{median(ratios):.3f}x ({ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
    main()
