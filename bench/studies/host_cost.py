"""Measures the host's work per decode step on the Metal path: `python -m cortexmlx.bench.studies.host_cost [MODEL]`.

The kernel calls are stubs, so it runs without a GPU. The work list, the metadata and the graph of every layer are real.
In the same run, mlx-lm builds its graph of the same model with its own caches, for comparison.

With `--texts` it takes no model: it measures what MLX's part of a launch costs the host with the readable text of a
kernel, and with the text that is sent. MLX puts a kernel's text together at each call, also without a GPU while it
traces an export. The hash of the text, which it makes at each launch, is not in it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cortexmlx.cpu import blas

blas.preload()  # before mlx is imported

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache  # noqa: E402

from cortexmlx import SamplingParams  # noqa: E402
from cortexmlx.attention.metal import MetalAttention  # noqa: E402
from cortexmlx.attention.selfcheck_problems import DecodeProblem, make_decode_problem  # noqa: E402
from cortexmlx.core.config import EngineConfig  # noqa: E402
from cortexmlx.core.core import EngineCore  # noqa: E402
from cortexmlx.core.handle import RequestHandle  # noqa: E402
from cortexmlx.core.text import StopConditions  # noqa: E402
from cortexmlx.execution.runner import ModelRunner  # noqa: E402
from cortexmlx.metal.kernels import REDUCE_ENTRY, DecodeKernels, kernel_text  # noqa: E402
from cortexmlx.metal.results import make_whole_entry  # noqa: E402
from cortexmlx.metal.rules import GEOMETRIES, Variant  # noqa: E402
from cortexmlx.scheduling.plan import StepKind  # noqa: E402
from cortexmlx.types.request import QueuedRequest, RequestId  # noqa: E402

PROMPT = 64
STEPS = 32


def make_stub_kernel(**_: Any) -> Callable[..., Sequence[mx.array]]:
    """Return a stand-in for a kernel of `mx.fast.metal_kernel`: its calls return zeros of the right shapes."""

    def call(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
        return [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

    return call


@dataclass
class _TimedAttention:
    """An attention backend, and the seconds spent in it."""

    attention: MetalAttention
    seconds: float = 0.0

    def attend(self, *args: Any, **options: Any) -> mx.array:
        """Compute attention by the backend, and add the time that the call takes."""
        started = time.perf_counter()
        output = self.attention.attend(*args, **options)
        self.seconds += time.perf_counter() - started
        return output


@dataclass(frozen=True)
class HostCost:
    """Seconds of the host's work per decode step, ours and mlx-lm's.

    Each figure is the lower quartile of the steps, because other work on the machine only adds time.
    """

    rows: int
    build: float
    """Building the step here."""
    attention: float
    """The part of it that is attention."""
    mlx_lm: float
    """Building mlx-lm's graph."""


def measure_host_cost(model: str, rows: int) -> HostCost:
    """Decode `rows` rows with cortexmlx and with mlx-lm, for about `STEPS` steps in which all rows decode."""
    core = EngineCore(EngineConfig(model, max_rows=rows, prefill_budget=4096, pipeline=False, speculate=False))
    timed_attention = _TimedAttention(MetalAttention(make_stub_kernel, check=False))
    assert isinstance(core.runner, ModelRunner), "the host's cost is that of paged attention"
    core.runner._attend = timed_attention.attend
    core.runner._feed.enabled = False  # a GPU gets a step as a whole: see `cpu/feed.py`
    params = SamplingParams(max_tokens=STEPS + 2 * rows, ignore_eos=True, temperature=0.0)
    for row in range(rows):
        handle = RequestHandle(RequestId(row), core.cancel)
        core.add(
            QueuedRequest(tuple(range(row + 1, row + PROMPT + 1)), params, row, time.perf_counter()),
            handle,
            StopConditions(),
        )
    builds, attentions = [], []
    while not core.idle:
        seconds_before = (core.runner.build_seconds, timed_attention.seconds)
        core.step()
        plan = core._in_flight[-1] if core._in_flight else None
        if plan is not None and plan.kind is StepKind.DECODE and plan.flush is None and len(plan.segments) == rows:
            builds.append(core.runner.build_seconds - seconds_before[0])
            attentions.append(timed_attention.seconds - seconds_before[1])
    mlx_lm_builds = _mlx_lm_build_seconds(core.loaded.model, rows)
    return HostCost(rows, *(statistics.quantiles(times[1:])[0] for times in (builds, attentions, mlx_lm_builds)))


def _mlx_lm_build_seconds(model: Any, rows: int) -> list[float]:
    """Return the seconds that mlx-lm takes to build each decode step's graph, with sampling."""
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


@dataclass(frozen=True)
class TextCost:
    """Bytes of a kernel's Metal text and seconds per call, with comments (`written_*`) and minified (`sent_*`)."""

    kernel: str
    written_bytes: int
    sent_bytes: int
    written_seconds: float
    sent_seconds: float


SHAPES = (
    Variant("float16", "float16", 128, 128, 32, 1),
    Variant("float16", "float16", 128, 128, 32, 8),
    Variant("float16", "float16", 128, 128, 32, 8, kv_bits=8, quant_group=64),
    Variant("float16", "float16", 512, 512, 32, 8),
)
PAIRS, CALLS = 40, 25


def measure_text_costs() -> list[TextCost]:
    """Measure what minifying saves for each decode kernel and the reduce kernel: medians of pairs of runs in turns."""
    written_texts, sent_texts, costs = _unminified_texts(), dict[str, int](), dict[str, TextCost]()

    def as_written(*, name: str, header: str, source: str, **options: Any) -> Any:
        sent_texts[name] = len(header) + len(source)
        header, source = written_texts[name]
        return mx.fast.metal_kernel(name=name, header=header, source=source, **options)

    written_kernels, minified_kernels = DecodeKernels(as_written), DecodeKernels(mx.fast.metal_kernel)
    for variant in SHAPES:
        problem, geometry = make_decode_problem(variant, None), variant.geometry
        decode = f"cortex_{geometry.name}" + ("_quantized" if variant.kv_bits else "")
        for name in (decode, "cortex_paged_reduce"):
            seconds = _time_pairs(written_kernels, minified_kernels, variant, problem, reduce=name != decode)
            costs.setdefault(name, TextCost(name, sum(map(len, written_texts[name])), sent_texts[name], *seconds))
    return list(costs.values())


def _unminified_texts() -> dict[str, tuple[str, str]]:
    """Return the header, with all of our headers in it, and the entry of each kernel before they are minified."""
    texts = {"cortex_paged_reduce": (kernel_text("paged_reduce.metal"), REDUCE_ENTRY)}
    for geometry in GEOMETRIES.values():
        text = kernel_text(geometry.file)
        for kind, entry in (("", geometry.entry), ("_quantized", geometry.quantized_entry or "")):
            texts[f"cortex_{geometry.name}{kind}"] = (text, entry)
            texts[f"cortex_{geometry.name}_whole{kind}"] = (text, make_whole_entry(entry))
    return texts


def _time_pairs(
    written_kernels: DecodeKernels,
    minified_kernels: DecodeKernels,
    variant: Variant,
    problem: DecodeProblem,
    *,
    reduce: bool,
) -> tuple[float, float]:
    """Return the median seconds of one call, with `written_kernels` and with `minified_kernels`."""
    times: tuple[list[float], list[float]] = ([], [])

    def traced(queries: mx.array) -> mx.array:
        inputs = replace(problem.inputs, queries=queries)
        partials = written_kernels.decode(variant, problem.items, inputs)
        for _ in range(PAIRS):
            for kernels, seconds in zip((written_kernels, minified_kernels), times, strict=True):
                started = time.perf_counter()
                for _ in range(CALLS):
                    if reduce:
                        kernels.reduce(variant, partials, inputs)
                    else:
                        kernels.decode(variant, problem.items, inputs)
                seconds.append((time.perf_counter() - started) / CALLS)
        return partials

    with tempfile.TemporaryDirectory() as folder:
        mx.export_function(f"{folder}/call", traced, problem.inputs.queries)
    return statistics.median(times[0]), statistics.median(times[1])


def text_cost_table() -> str:
    """Measure the costs of kernel texts, and return them as a table."""
    lines = ["kernel                       written    sent  microseconds of a call: before     now   ratio"]
    lines += [
        f"{cost.kernel.removeprefix('cortex_'):<27}{cost.written_bytes:>9}{cost.sent_bytes:>8}"
        f"{cost.written_seconds * 1e6:>31.1f}{cost.sent_seconds * 1e6:>8.1f}"
        f"{cost.sent_seconds / cost.written_seconds:>8.2f}"
        for cost in measure_text_costs()
    ]
    return "\n".join(lines)


def host_cost_table(model: str) -> str:
    """Measure the host's work at 1 and 16 rows, and return it as a table."""
    lines = [f"{model}: milliseconds of host work per decode step, kernel calls stubbed"]
    lines.append("rows    build    of it attention    mlx-lm's graph    ratio")
    for rows in (1, 16):
        cost = measure_host_cost(model, rows)
        lines.append(
            f"{rows:>4}{cost.build * 1e3:>9.2f}{cost.attention * 1e3:>19.2f}{cost.mlx_lm * 1e3:>18.2f}"
            f"{cost.build / cost.mlx_lm:>9.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(
        text_cost_table() if "--texts" in sys.argv else host_cost_table(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    )
