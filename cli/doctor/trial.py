"""A short run of a real engine for the report: decode speed compared with mlx-lm, and the engine's statistics."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cortexmlx.cli.doctor.report import CheckStatus, DoctorCheck
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.stats import EngineStats
from cortexmlx.system.machine import working_set_bytes

if TYPE_CHECKING:
    from cortexmlx.engine import Engine
    from cortexmlx.metal.kernels import KernelFactory


def check_arena_writes(stats: EngineStats) -> Iterator[DoctorCheck]:
    """Check that the KV cache was written in place, and on a GPU how many command buffers a decode step takes."""
    writes, buffers = stats.arena_writes, stats.command_buffers
    if writes.copied:
        size = format_bytes(writes.copied_bytes)
        detail = f"{writes.copied} of {writes.measured} measured writes copied a part of it, {size}"
        yield DoctorCheck("KV cache", CheckStatus.WARN, detail, "this costs memory and time: please report it")
    elif writes.measured:
        yield DoctorCheck("KV cache", CheckStatus.OK, f"written in place in all of {writes.measured} measured writes")
    else:
        yield DoctorCheck(
            "KV cache", CheckStatus.OK, "not measured: it is small, or others took memory at the same time"
        )
    if buffers is None:
        return
    detail = (
        f"about {buffers.per_step} a step, each of up to {buffers.max_operations:,} kernels or "
        f"{buffers.max_elements:,} Mi elements; MLX queues {buffers.run_ahead:.0%} of a step"
    )
    if buffers.may_idle:
        advice = "raise MLX_MAX_OPS_PER_BUFFER and MLX_MAX_MB_PER_BUFFER: the GPU may wait between steps"
        yield DoctorCheck("GPU queue", CheckStatus.WARN, detail, advice)
    else:
        yield DoctorCheck("GPU queue", CheckStatus.OK, detail)


PROMPT, TOKENS = 200, 40
"""Tokens of a prompt, and of its answer: a few flushes of the tail."""

RUNS_PER_SIDE = 3
"""Runs of each side."""

MAX_SECONDS = 10.0
"""No further pair begins after this time."""

_PERSONAL_OR_LONG = ("timeline", "sequences", "requests", "kv_store")


def run_trial(announce: Callable[[str], None]) -> tuple[dict[str, Any], list[DoctorCheck]]:
    """Run a model briefly and return the report's engine sections by name, and checks of that engine. It runs the
    starter model, or a tiny random one if that is not installed. A section that fails has the error. `announce` is
    called with a line for each.
    """
    with ExitStack() as stack:
        announce("opening a model")
        try:
            name, engine = _open_trial_engine(stack)
        except Exception as error:  # an installation that is not whole, too: then a report helps most
            return {"model": _error_section(error)}, []
        sections: dict[str, Any] = {"model": {"name": name, "dtype": engine.info.dtype}}
        for section, make in SECTIONS.items():
            announce(section)
            try:
                sections[section] = make(engine)
            except Exception as error:
                sections[section] = _error_section(error)
        return sections, list(check_arena_writes(engine.stats()))


def _open_trial_engine(stack: ExitStack) -> tuple[str, Engine]:
    """Return a model's name, and an engine that is closed with `stack`."""
    from cortexmlx.bench.measure.random_model import NAME, write_random_model
    from cortexmlx.engine import Engine
    from cortexmlx.models.resolve import STARTER, starter_path

    name = path = STARTER
    if starter_path() is None:
        name, path = NAME, str(write_random_model(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
    return name, stack.enter_context(Engine(path, max_rows=4, prefix_cache=False, token_target=None))


def _error_section(error: Exception) -> dict[str, str]:
    return {"error": f"{type(error).__name__}: {error}"}


def compare_decode(engine: Engine) -> dict[str, Any]:
    """Compare the speed of decoding with mlx-lm's: same weights and prompts, in pairs, each side first in turn."""
    from cortexmlx.bench.measure.trace import BenchRequest, RunTrace
    from cortexmlx.bench.suites.against import Contest

    contest = Contest(lambda: engine, seed=0)

    def make_requests(number: int) -> list[BenchRequest]:
        return [BenchRequest(contest.make_prompts("report", number).next_prompt(PROMPT), TOKENS)]

    def run_cortexmlx(number: int) -> RunTrace:
        return contest.make_cortex().run(make_requests(number))

    def run_mlx_lm(number: int) -> RunTrace:
        return contest.make_mlx_lm().run(make_requests(number))

    for run in (run_cortexmlx, run_mlx_lm):  # the first steps of a kind take longer
        run(0)
    start_time, pairs = time.monotonic(), list[tuple[RunTrace, RunTrace]]()
    while len(pairs) < RUNS_PER_SIDE and (not pairs or time.monotonic() - start_time < MAX_SECONDS):
        number = len(pairs) + 1
        if number % 2:
            cortex_run, mlx_lm_run = run_cortexmlx(number), run_mlx_lm(number)
        else:
            mlx_lm_run, cortex_run = run_mlx_lm(number), run_cortexmlx(number)
        pairs.append((cortex_run, mlx_lm_run))
    return {
        "prompt_tokens": PROMPT,
        "generated_tokens": TOKENS,
        "cortexmlx_tokens_per_second": [mine.decode_rate().wall for mine, _ in pairs],
        "mlx_lm_tokens_per_second": [other.decode_rate().wall for _, other in pairs],
        "same_tokens": [mine.tokens == other.tokens for mine, other in pairs],
    }


def engine_section(engine: Engine) -> dict[str, Any]:
    """Return the engine's statistics, without those that are long or about requests."""
    figures = asdict(engine.stats())
    return {name: value for name, value in figures.items() if name not in _PERSONAL_OR_LONG}


IDLE_SECONDS, IDLE_BYTES = 5.0, 2 << 30
"""A pause after which macOS may have unwired memory, and bytes that are read after it: as many as of a small model, so
that the GPU's own way out of its sleep counts for little.
"""


def time_reads_after_idle(_: Engine) -> dict[str, Any]:
    """Time reads of an array: at once, and after pauses, in which macOS may unwire memory without a wired limit."""
    import mlx.core as mx

    array = mx.zeros(min(IDLE_BYTES, working_set_bytes() // 4) // 4)
    seconds: dict[float, list[float]] = {0.0: [], IDLE_SECONDS: []}
    for pause in (0.0, *[0.0, IDLE_SECONDS] * RUNS_PER_SIDE):
        time.sleep(pause)
        start_time = time.perf_counter()
        mx.eval(mx.max(array))
        seconds[pause].append(time.perf_counter() - start_time)
    busy, after_idle = seconds[0.0][1:], seconds[IDLE_SECONDS]
    return {"bytes": array.nbytes, "idle_seconds": IDLE_SECONDS, "busy_seconds": busy, "after_idle_seconds": after_idle}


def measure_kernels(engine: Engine) -> list[dict[str, Any]]:
    """Measure our kernels and MLX's with layer sizes of known models. Return the records; none without a Metal GPU."""
    import mlx.core as mx

    from cortexmlx.attention.backends import auto_backend_name
    from cortexmlx.bench.suites.known_models import measure_models

    on_gpu = auto_backend_name() == "metal"
    return list(measure_models(cast("KernelFactory", mx.fast.metal_kernel), "metal")) if on_gpu else []


SECTIONS: dict[str, Callable[[Engine], Any]] = {
    "a short decode beside mlx-lm": compare_decode,
    "stats": engine_section,
    "memory after a pause": time_reads_after_idle,
    "speeds": measure_kernels,
}
"""The sections by name, in order. Each returns data for JSON."""
