"""The host's work per decode step on the Metal path: `python -m cortexmlx.bench.studies.host_cost [MODEL]`.

The kernel calls are stubs, so it runs without a GPU. The work list, the metadata and the graph of every layer are real.
In the same run, mlx-lm builds its graph of the same model with its own caches, for comparison.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cortexmlx.cpu import blas

blas.preload()  # before mlx is imported

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache  # noqa: E402

from cortexmlx import SamplingParams  # noqa: E402
from cortexmlx.attention.metal import MetalAttention  # noqa: E402
from cortexmlx.execution.runner import ModelRunner  # noqa: E402
from cortexmlx.request import QueuedRequest, RequestId  # noqa: E402
from cortexmlx.scheduling.steps.plan import StepKind  # noqa: E402
from cortexmlx.serving.config import EngineConfig  # noqa: E402
from cortexmlx.serving.core import EngineCore  # noqa: E402
from cortexmlx.serving.handle import RequestHandle  # noqa: E402
from cortexmlx.serving.text.stops import Stops  # noqa: E402

PROMPT = 64
STEPS = 32


def stub_factory(**_: Any) -> Callable[..., Sequence[mx.array]]:
    """A stand-in for `mx.fast.metal_kernel`: its calls return zeros of the right shapes."""

    def call(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
        return [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

    return call


@dataclass
class _Timed:
    """An attention backend, and the seconds spent in it."""

    attention: MetalAttention
    seconds: float = 0.0

    def attend(self, *args: Any, **options: Any) -> mx.array:
        started = time.perf_counter()
        out = self.attention.attend(*args, **options)
        self.seconds += time.perf_counter() - started
        return out


@dataclass(frozen=True)
class HostCost:
    """Seconds of host work per decode step within a window.

    Each figure is the lower quartile of the steps, because other work on the machine only adds time.
    """

    rows: int
    build: float
    """Building the step here."""
    attention: float
    """The part of it that is attention."""
    mlx_lm: float
    """Building mlx-lm's graph."""


def measure(model: str, rows: int) -> HostCost:
    """Decode `rows` rows with both, for about `STEPS` steps in which all rows decode."""
    core = EngineCore(EngineConfig(model, max_rows=rows, prefill_budget=4096, pipeline=False))
    timed = _Timed(MetalAttention(stub_factory, check=False))
    assert isinstance(core.runner, ModelRunner), "the host's cost is that of paged attention"
    core.runner._attend = timed.attend
    params = SamplingParams(max_tokens=STEPS + 2 * rows, ignore_eos=True, temperature=0.0)
    for row in range(rows):
        handle = RequestHandle(RequestId(row), core.cancel)
        core.add(
            QueuedRequest(tuple(range(row + 1, row + PROMPT + 1)), params, row, time.perf_counter()), handle, Stops()
        )
    builds, attentions = [], []
    while not core.idle:
        before = (core.runner.build_seconds, timed.seconds)
        core.step()
        plan = core._in_flight[-1] if core._in_flight else None
        if plan is not None and plan.kind is StepKind.DECODE and plan.flush is None and len(plan.segments) == rows:
            builds.append(core.runner.build_seconds - before[0])
            attentions.append(timed.seconds - before[1])
    theirs = _mlx_lm(core.loaded.model, rows)
    return HostCost(rows, *(statistics.quantiles(times[1:])[0] for times in (builds, attentions, theirs)))


def _mlx_lm(model: Any, rows: int) -> list[float]:
    """Return the seconds that building each decode step's graph takes, with sampling."""
    layers = len(make_prompt_cache(model))
    cache = make_prompt_cache(model) if rows == 1 else [BatchKVCache([0] * rows) for _ in range(layers)]
    tokens = mx.broadcast_to(mx.arange(1, PROMPT + 1), (rows, PROMPT))
    seconds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        logits = model(tokens, cache=cache)[:, -1]
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        tokens = mx.argmax(scores, axis=-1)[:, None]
        seconds.append(time.perf_counter() - started)
        mx.eval(tokens)
    return seconds


def table(model: str) -> str:
    """Return the costs at 1 and 16 rows as text."""
    lines = [f"{model}: milliseconds of host work per decode step, kernel calls stubbed"]
    lines.append("rows    build    of it attention    mlx-lm's graph    ratio")
    for rows in (1, 16):
        cost = measure(model, rows)
        lines.append(
            f"{rows:>4}{cost.build * 1e3:>9.2f}{cost.attention * 1e3:>19.2f}{cost.mlx_lm * 1e3:>18.2f}"
            f"{cost.build / cost.mlx_lm:>9.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(sys.argv[1] if len(sys.argv) > 1 else "smollm2"))
