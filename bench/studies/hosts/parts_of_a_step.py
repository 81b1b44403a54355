"""Measures where the time of a decode step goes with several hosts: `python -m
cortexmlx.bench.studies.hosts.parts_of_a_step [MODEL]`.

Two engines have the same model in as many workers: real ones, and others that exchange no numbers (`mute_worker`) but
compute arrays of the same shapes. They take turns, so that noise meets both. What a rank's step takes without
exchanges is its computing; what it takes longer with them is exchanging, and waiting for the other ranks in it. Both
engines' ranks work at once, on the same cores.

It is for tensor parallel: the ranks of a pipeline compute one after the other, not at once.

How it could mislead: ranks that share cores wait for each other because of that. On as many machines, exchanges would
take what the network takes, and computing would be faster. Without exchanges ranks drift apart within a decode window,
which lets them use the cores better. On a busy machine, look at the counts and at the shares, not at the times.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest import mock

from cortexmlx import Engine
from cortexmlx.bench.studies.hosts import mute_worker
from cortexmlx.core.core import EngineCore
from cortexmlx.distributed import group
from cortexmlx.distributed.remote_runner import RemoteRunner
from cortexmlx.distributed.worker_group import WorkerGroup

_PROMPT = 12
"""Tokens of each prompt."""


@dataclass(frozen=True)
class EngineClocks:
    """The seconds that an engine has spent so far in each part of its steps."""

    steps: int
    timestamp: float
    plan: float
    send: float
    """Making calls for the workers, and sending them."""
    wait: float
    """Waiting for their answers."""
    commit: float
    ranks: tuple[float, ...]
    """What each rank's own steps took."""

    @classmethod
    def read(cls, core: EngineCore) -> EngineClocks:
        """Read the clocks, on the engine's thread."""
        runner, measurements = core.runner, core.measurements
        assert isinstance(runner, RemoteRunner)
        ranks = tuple(rank.build_seconds + rank.wait_seconds for rank in runner.ranks)
        plan, commit = measurements.plan_timer.seconds, measurements.commit_timer.seconds
        now = time.perf_counter()
        return cls(core.scheduler.planned_steps, now, plan, runner.build_seconds, runner.wait_seconds, commit, ranks)


@dataclass(frozen=True)
class StepParts:
    """The milliseconds of an average step, by part."""

    total: float
    plan: float
    send: float
    wait: float
    commit: float
    ranks: tuple[float, ...]

    @classmethod
    def mean_between(cls, clocks_before: EngineClocks, clocks_after: EngineClocks) -> StepParts:
        """Return the average of the steps between two readings of the clocks."""
        ms_per_step = 1000 / (clocks_after.steps - clocks_before.steps)
        return cls(
            total=ms_per_step * (clocks_after.timestamp - clocks_before.timestamp),
            plan=ms_per_step * (clocks_after.plan - clocks_before.plan),
            send=ms_per_step * (clocks_after.send - clocks_before.send),
            wait=ms_per_step * (clocks_after.wait - clocks_before.wait),
            commit=ms_per_step * (clocks_after.commit - clocks_before.commit),
            ranks=tuple(ms_per_step * (b - a) for a, b in zip(clocks_before.ranks, clocks_after.ranks, strict=True)),
        )


@dataclass(frozen=True)
class StepBreakdown:
    """Where a step's time goes (ms), with and without exchanges between hosts: the rounds of median time."""

    real: StepParts
    computing_times: tuple[float, ...]
    """What each rank's step takes without exchanges."""

    @property
    def exchange_times(self) -> tuple[float, ...]:
        """How much longer each rank's step takes with exchanges."""
        return tuple(
            real - computing_time for real, computing_time in zip(self.real.ranks, self.computing_times, strict=True)
        )

    @property
    def round_trip(self) -> float:
        """How much longer the controller waits than the slowest rank works: the way there and back."""
        return self.real.wait - max(self.real.ranks)

    @property
    def other_time(self) -> float:
        """The time of a step that is in none of the controller's parts."""
        return self.real.total - self.real.plan - self.real.send - self.real.wait - self.real.commit


def measure_step(engine: Engine, rows: int, tokens: int) -> StepParts:
    """Decode `tokens` tokens in each of `rows` answers. Return the parts of the average step after the first tokens."""
    prompts = [[1 + row, *range(2, 1 + _PROMPT)] for row in range(rows)]
    handles = [engine.submit(prompt, max_tokens=tokens, ignore_eos=True) for prompt in prompts]
    for handle in handles:
        next(iter(handle))
    clocks_before = engine.inspect(EngineClocks.read)
    for handle in handles:
        handle.result()
    return StepParts.mean_between(clocks_before, engine.inspect(EngineClocks.read))


@contextmanager
def open_both_engines(model: str, hosts: str) -> Iterator[tuple[Engine, Engine]]:
    """Open the model in real workers, and in workers that exchange nothing."""
    mute = partial(WorkerGroup, worker=(sys.executable, "-P", mute_worker.__file__))
    make_engine = partial(Engine, model, hosts=hosts, kv_memory="64MB", speculate=False)
    with ExitStack() as stack:
        real_engine = stack.enter_context(make_engine())
        with mock.patch.object(group, "WorkerGroup", mute):
            mute_engine = stack.enter_context(make_engine())
        yield real_engine, mute_engine


def measure_step_parts(model: str, hosts: str, rows: int, tokens: int, rounds: int) -> StepBreakdown:
    """Measure the step of both engines in turns."""
    steps: tuple[list[StepParts], list[StepParts]] = ([], [])
    with open_both_engines(model, hosts) as engines:
        for engine in engines:
            measure_step(engine, rows, tokens)  # what happens once
        for _ in range(rounds):
            for engine, engine_steps in zip(engines, steps, strict=True):
                engine_steps.append(measure_step(engine, rows, tokens))
    return StepBreakdown(_median_step(steps[0]), _median_step(steps[1]).ranks)


def _median_step(steps: Sequence[StepParts]) -> StepParts:
    """Return the step of median time: its parts add up, which medians of parts would not."""
    return sorted(steps, key=lambda step: step.total)[len(steps) // 2]


def report(breakdown: StepBreakdown, title: str) -> str:
    """Return the breakdown of a step as Markdown tables."""
    real = breakdown.real
    controller = [
        ("plan", real.plan),
        ("send", real.send),
        ("wait for the workers", real.wait),
        ("... of it, longer than the slowest rank works", breakdown.round_trip),
        ("commit", real.commit),
        ("all else", breakdown.other_time),
        ("a step", real.total),
    ]
    lines = [title, "", "| controller | ms | percent |", "|---|---:|---:|"]
    lines += [f"| {name} | {ms:.3f} | {100 * ms / real.total:.1f} |" for name, ms in controller]
    lines += [
        "",
        "| rank | computing, ms | exchanging and waiting in it, ms | exchanging, percent |",
        "|---:|---:|---:|---:|",
    ]
    for rank, (computing_time, exchange_time) in enumerate(
        zip(breakdown.computing_times, breakdown.exchange_times, strict=True)
    ):
        lines.append(
            f"| {rank} | {computing_time:.3f} | {exchange_time:.3f} | "
            f"{100 * exchange_time / (computing_time + exchange_time):.1f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m cortexmlx.bench.studies.hosts.parts_of_a_step")
    parser.add_argument("model", nargs="?", default="smollm2", help="a model (default smollm2)")
    parser.add_argument("--hosts", default="3:mpi", help="as for cortexmlx (default 3:mpi)")
    parser.add_argument("--rows", type=int, default=1, help="answers at once (default 1)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of both engines (default 5)")
    options = parser.parse_args(argv)
    breakdown = measure_step_parts(options.model, options.hosts, options.rows, options.tokens, options.rounds)
    title = f"{options.model} by --hosts {options.hosts}, {options.rows} rows, the median of {options.rounds} rounds:"
    print(report(breakdown, title))


if __name__ == "__main__":
    main()
