"""Compares the memory that `cortexmlx plan` predicts for a run with what the run took.

`python -m cortexmlx.bench.studies.plan_accuracy [SETTING ...]`.

Each setting runs in its own process. Its queue has three times as many requests as there are rows, with prompts that
share nothing. So the arena grows to its limit and is full of prefixes in the end. The figure is MLX's own peak of the
bytes in use (`mx.get_peak_memory`), from the first request on.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cortexmlx.cpu import blas

blas.preload()  # before mlx is imported

CONSTANT = 8 << 20
"""Bytes by which a peak may differ from its plan, in addition to 2 %: see docs/memory.md."""

STARTER = "smollm2"

COMMAND = "from cortexmlx.cli import main; main()"
"""`cortexmlx` in the current interpreter."""


@dataclass(frozen=True)
class RunSetting:
    """A run to predict and measure: the model, the KV memory and the rows."""

    kind: str
    """The model: a kind of `bench.studies.layer_kinds`, or the starter."""
    kv_memory: str
    """The memory of the cache."""
    max_rows: int
    tokens: int
    """Tokens of a row."""
    block_size: int = 32
    prefill_budget: int = 512
    kv_bits: int | None = None

    @property
    def name(self) -> str:
        """The setting's name in the table."""
        return (
            f"{self.kind}, {self.kv_memory}, {self.max_rows} rows of {self.tokens:,}, blocks of {self.block_size}, "
            f"pieces of {self.prefill_budget}{f', {self.kv_bits} bits' if self.kv_bits else ''}"
        )

    @property
    def options(self) -> dict[str, Any]:
        """The options that both the plan and the engine get."""
        names = ("kv_memory", "max_rows", "block_size", "prefill_budget", "kv_bits")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


SETTINGS = (
    RunSetting(STARTER, "60MB", 4, 300),
    RunSetting(STARTER, "60MB", 2, 640, block_size=64, prefill_budget=256),
    RunSetting(STARTER, "50MB", 8, 120, block_size=16, prefill_budget=128),
    RunSetting("full", "30MB", 2, 1_500),
    RunSetting("full", "10MB", 2, 1_500, kv_bits=8),
    RunSetting("full", "40MB", 16, 250, block_size=8, prefill_budget=256),
    RunSetting("windows", "40MB", 4, 1_000),
    RunSetting("experts and sinks", "40MB", 4, 800, block_size=16),
    RunSetting("latent", "60MB", 4, 800),
    RunSetting("hybrid", "16MB", 4, 300, prefill_budget=128),
    RunSetting("hybrid of convolutions", "40MB", 8, 500),
    RunSetting("recurrent", "30MB", 4, 200, prefill_budget=64),
)


@dataclass(frozen=True)
class PlanOutcome:
    """The predicted and the measured memory of a setting. All sizes are in bytes."""

    name: str
    planned: int
    """The planned peak."""
    peak: int
    """The peak that MLX measured."""
    parts: dict[str, int]
    """The parts of the plan."""
    process: int
    """The peak resident memory of the whole process, as the system reports it."""
    seconds: float

    @property
    def relative_error(self) -> float:
        """The difference of the peak from the plan, as a fraction of the plan."""
        return (self.peak - self.planned) / self.planned

    @property
    def is_within_plan(self) -> bool:
        """Whether the peak is not above the plan by more than 2 % and `CONSTANT`."""
        return self.peak - self.planned <= 0.02 * self.planned + CONSTANT


def measure_setting(setting: RunSetting) -> PlanOutcome:
    """Predict the memory of a run, run it, and return both figures."""
    with tempfile.TemporaryDirectory(prefix="cortexmlx-promise-") as folder:
        model = _make_model(setting.kind, Path(folder))
        plan = _predict_memory(model, setting)
        start_time = time.perf_counter()
        peak = _measure_peak(model, setting, plan["rows"])
        process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        parts = {name: size for name, size in plan.items() if name.endswith("_bytes") and name != "peak_bytes"}
        return PlanOutcome(setting.name, plan["peak_bytes"], peak, parts, process, time.perf_counter() - start_time)


def _make_model(kind: str, folder: Path) -> str:
    """Return the starter's name, or write a random model of a kind and return its path."""
    from cortexmlx.bench.measure.random_model import write_random_model
    from cortexmlx.bench.studies.layer_kinds import COMMON, KINDS

    return kind if kind == STARTER else str(write_random_model(folder, {**COMMON, **KINDS[kind]}))


def _predict_memory(model: str, setting: RunSetting) -> dict[str, int]:
    """Return what `cortexmlx plan` predicts, from its own process."""
    command = [sys.executable, "-c", COMMAND, "plan", model, "--json", "--context", str(setting.tokens)]
    for option, value in setting.options.items():
        command += [f"--{option.replace('_', '-')}", str(value)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    (run,) = json.loads(result.stdout)["runs"]
    return dict(run)


def _measure_peak(model: str, setting: RunSetting, rows: int) -> int:
    """Return MLX's peak memory, in bytes, while three times as many requests as fit are answered."""
    import mlx.core as mx
    import numpy as np

    from cortexmlx.core.config import EngineConfig
    from cortexmlx.core.core import EngineCore
    from cortexmlx.core.handle import RequestHandle
    from cortexmlx.core.text import StopConditions
    from cortexmlx.types.request import QueuedRequest, RequestId
    from cortexmlx.types.sampling_params import SamplingParams

    core = EngineCore(EngineConfig(model, token_target=None, **setting.options))
    mx.reset_peak_memory()
    random = np.random.default_rng(0)
    handles = []
    for number in range(3 * rows):
        answer = rows + 17 + 12 * (number % rows)  # lengths differ, so that requests do not all end at once
        prompt = tuple(random.integers(0, core.info.vocab_size, max(1, setting.tokens - answer)).tolist())
        handles.append(RequestHandle(RequestId(number), core.cancel))
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        core.add(QueuedRequest(prompt, params, submit_time=time.perf_counter()), handles[-1], StopConditions())
    while not core.idle:
        core.step()
    for handle in handles:
        handle.result(0)  # raises if the request failed
    return int(mx.get_peak_memory())


def outcome_table(outcomes: Iterable[PlanOutcome]) -> str:
    """Return the predicted and measured memory of each setting as a Markdown table, in MB."""
    lines = [
        "| setting | weights | arena | states, snapshots | prefill step | decode step | planned | peak | differs by |",
        "|:--|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for o in outcomes:
        p = o.parts
        each = (
            p["weight_bytes"],
            p["arena_bytes"],
            p["states_bytes"] + p["snapshot_bytes"],
            p["prefill_bytes"],
            p["tail_bytes"] + p["decode_bytes"],
            o.planned,
            o.peak,
        )
        figures = " | ".join(f"{size / 1e6:.1f}" for size in each)
        lines.append(
            f"| {o.name} | {figures} | {100 * o.relative_error:+.2f} %{'' if o.is_within_plan else ' **too far**'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure the settings, and print the table. The exit code is 1 if a peak is too far from its plan."""
    parser = argparse.ArgumentParser(
        prog="python -m cortexmlx.bench.studies.plan_accuracy", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("settings", nargs="*", type=int, metavar="SETTING", help="numbers of settings; none: all")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(asdict(measure_setting(SETTINGS[options.one]))))
        return
    outcomes = [_measure_in_process(number) for number in options.settings or range(len(SETTINGS))]
    print(outcome_table(outcomes))
    sys.exit(not all(outcome.is_within_plan for outcome in outcomes))


def _measure_in_process(number: int) -> PlanOutcome:
    """Measure a setting in its own process."""
    command = [sys.executable, "-m", "cortexmlx.bench.studies.plan_accuracy", "--one", str(number)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(result.stdout)
    return PlanOutcome(**figures)


if __name__ == "__main__":
    main()
