"""The cost of quantized keys and values per decode step: `python -m cortexmlx.bench.studies.quantized [MODEL
[TOKENS]]`.

Engines with plain, 8-bit and 4-bit keys and values decode the same rows in one process. They take turns step by step,
so that the machine's other work affects all of them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cortexmlx.cpu import blas

blas.preload()  # before mlx is imported

from cortexmlx import SamplingParams  # noqa: E402
from cortexmlx.request import QueuedRequest, RequestId  # noqa: E402
from cortexmlx.serving.config import EngineConfig  # noqa: E402
from cortexmlx.serving.core import EngineCore  # noqa: E402
from cortexmlx.serving.handle import RequestHandle  # noqa: E402
from cortexmlx.serving.text.stops import Stops  # noqa: E402

ROWS = 16
STEPS = 40
BITS = (None, 8, 4)


@dataclass(frozen=True)
class Seconds:
    """Seconds of a decode step of all rows: wall time, and CPU time of all threads."""

    wall: float
    cpu: float


class _Side:
    """An engine in which all rows decode."""

    def __init__(self, model: str, bits: int | None, rows: int, tokens: int, steps: int) -> None:
        config = EngineConfig(
            model, max_rows=rows, kv_bits=bits, prefill_budget=2048, token_target=None, pipeline=False
        )
        self.core = EngineCore(config)
        params = SamplingParams(max_tokens=steps + 3 * rows, ignore_eos=True, temperature=0.0)
        vocab = self.core.info.vocab_size
        for row in range(rows):
            handle = RequestHandle(RequestId(row), self.core.cancel)
            prompt = tuple((row * tokens + i) * 7919 % vocab for i in range(tokens))
            self.core.add(QueuedRequest(prompt, params, row, time.perf_counter()), handle, Stops())
        while any(not job.generated for job in self.core.scheduler.jobs):
            self.core.step()

    def step(self) -> Seconds:
        """Decode until every row has a new token."""
        before = self.core.measured.generated_tokens
        wall, cpu = time.perf_counter(), time.process_time()
        while self.core.measured.generated_tokens == before:
            self.core.step()
        return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def measure(model: str, rows: int, tokens: int, steps: int, bits: Sequence[int | None] = BITS) -> list[list[Seconds]]:
    """Return the steps of each side, in the order of `bits`. The sides take turns to go first."""
    sides = [_Side(model, each, rows, tokens, steps) for each in bits]
    found: list[list[Seconds]] = [[] for _ in sides]
    for step in range(steps):
        for i in range(len(sides)) if step % 2 == 0 else reversed(range(len(sides))):
            found[i].append(sides[i].step())
    return found


def table(model: str, tokens: int) -> str:
    """Return the ratio of quantized to plain in steps per second: quartiles and median of the pairs."""
    found = measure(model, ROWS, tokens, STEPS)
    lines = [f"{model}, {ROWS} rows from {tokens} tokens each, {STEPS} decode steps of each side in turns"]
    lines.append("bits      wall: quartile  median  quartile      CPU: quartile  median  quartile")
    for bits, steps in zip(BITS[1:], found[1:], strict=True):
        pairs = list(zip(found[0], steps, strict=True))
        figures = [*_quartiles([a.wall / b.wall for a, b in pairs]), *_quartiles([a.cpu / b.cpu for a, b in pairs])]
        low, mid, high, low_cpu, mid_cpu, high_cpu = (f"{figure:.2f}x" for figure in figures)
        lines.append(f"{bits:>4}{low:>20}{mid:>8}{high:>10}{low_cpu:>19}{mid_cpu:>8}{high_cpu:>10}")
    return "\n".join(lines)


def _quartiles(ratios: Sequence[float]) -> list[float]:
    return statistics.quantiles(ratios, n=4)


if __name__ == "__main__":
    asked = sys.argv[1:]
    print(table(asked[0] if asked else "smollm2", int(asked[1]) if len(asked) > 1 else 96))
