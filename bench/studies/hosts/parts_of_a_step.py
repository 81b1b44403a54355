"""Where the time of a decode step goes with hosts: `python -m cortexmlx.bench.studies.hosts.parts_of_a_step [MODEL]`.

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
class Clocks:
    """What an engine has spent so far, in seconds."""

    steps: int
    now: float
    plan: float
    send: float
    """Making calls for the workers, and sending them."""
    wait: float
    """Waiting for their answers."""
    commit: float
    ranks: tuple[float, ...]
    """What each rank's own steps took."""

    @classmethod
    def of(cls, core: EngineCore) -> Clocks:
        """Read them, on the engine's thread."""
        runner, measured = core.runner, core.measured
        assert isinstance(runner, RemoteRunner)
        ranks = tuple(rank.build_seconds + rank.wait_seconds for rank in runner.ranks)
        plan, commit = measured.planning.seconds, measured.committing.seconds
        now = time.perf_counter()
        return cls(core.scheduler.steps, now, plan, runner.build_seconds, runner.wait_seconds, commit, ranks)


@dataclass(frozen=True)
class Step:
    """Where an average step of some went, in milliseconds."""

    whole: float
    plan: float
    send: float
    wait: float
    commit: float
    ranks: tuple[float, ...]

    @classmethod
    def between(cls, before: Clocks, after: Clocks) -> Step:
        """The average of the steps between two readings."""
        each = 1000 / (after.steps - before.steps)
        return cls(
            whole=each * (after.now - before.now),
            plan=each * (after.plan - before.plan),
            send=each * (after.send - before.send),
            wait=each * (after.wait - before.wait),
            commit=each * (after.commit - before.commit),
            ranks=tuple(each * (b - a) for a, b in zip(before.ranks, after.ranks, strict=True)),
        )


@dataclass(frozen=True)
class Taken:
    """A step taken apart, in milliseconds: the rounds of median time."""

    real: Step
    computing: tuple[float, ...]
    """What each rank's step takes without exchanges."""

    @property
    def exchanging(self) -> tuple[float, ...]:
        """What each rank's step takes longer with exchanges."""
        return tuple(real - alone for real, alone in zip(self.real.ranks, self.computing, strict=True))

    @property
    def between(self) -> float:
        """What the controller waits longer than the slowest rank works: the way there and back."""
        return self.real.wait - max(self.real.ranks)

    @property
    def rest(self) -> float:
        """What is in none of the controller's parts."""
        return self.real.whole - self.real.plan - self.real.send - self.real.wait - self.real.commit


def decoded(engine: Engine, rows: int, tokens: int) -> Step:
    """Decode `tokens` in each of `rows` answers. Return where a step went, after the first tokens."""
    prompts = [[1 + row, *range(2, 1 + _PROMPT)] for row in range(rows)]
    handles = [engine.submit(prompt, max_tokens=tokens, ignore_eos=True) for prompt in prompts]
    for handle in handles:
        next(iter(handle))
    before = engine.inspect(Clocks.of)
    for handle in handles:
        handle.result()
    return Step.between(before, engine.inspect(Clocks.of))


@contextmanager
def engines(model: str, hosts: str) -> Iterator[tuple[Engine, Engine]]:
    """Open the model in real workers, and in others that exchange nothing."""
    mute = partial(WorkerGroup, worker=(sys.executable, "-P", mute_worker.__file__))
    opened_by = partial(Engine, model, hosts=hosts, kv_memory="64MB", speculate=False)
    with ExitStack() as opened:
        real = opened.enter_context(opened_by())
        with mock.patch.object(group, "WorkerGroup", mute):
            alone = opened.enter_context(opened_by())
        yield real, alone


def taken_apart(model: str, hosts: str, rows: int, tokens: int, rounds: int) -> Taken:
    """Measure both engines in turns."""
    steps: tuple[list[Step], list[Step]] = ([], [])
    with engines(model, hosts) as both:
        for engine in both:
            decoded(engine, rows, tokens)  # what happens once
        for _ in range(rounds):
            for engine, found in zip(both, steps, strict=True):
                found.append(decoded(engine, rows, tokens))
    return Taken(_middle(steps[0]), _middle(steps[1]).ranks)


def _middle(steps: Sequence[Step]) -> Step:
    """The round whose steps took the median time: its parts add up, which medians of parts would not."""
    return sorted(steps, key=lambda step: step.whole)[len(steps) // 2]


def report(taken: Taken, title: str) -> str:
    """Return the figures as Markdown tables."""
    real = taken.real
    controller = [
        ("plan", real.plan),
        ("send", real.send),
        ("wait for the workers", real.wait),
        ("... of it, longer than the slowest rank works", taken.between),
        ("commit", real.commit),
        ("all else", taken.rest),
        ("a step", real.whole),
    ]
    lines = [title, "", "| controller | ms | percent |", "|---|---:|---:|"]
    lines += [f"| {name} | {ms:.3f} | {100 * ms / real.whole:.1f} |" for name, ms in controller]
    lines += [
        "",
        "| rank | computing, ms | exchanging and waiting in it, ms | exchanging, percent |",
        "|---:|---:|---:|---:|",
    ]
    for rank, (alone, more) in enumerate(zip(taken.computing, taken.exchanging, strict=True)):
        lines.append(f"| {rank} | {alone:.3f} | {more:.3f} | {100 * more / (alone + more):.1f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m cortexmlx.bench.studies.hosts.parts_of_a_step")
    parser.add_argument("model", nargs="?", default="smollm2", help="a model (default smollm2)")
    parser.add_argument("--hosts", default="3:mpi", help="as for cortexmlx (default 3:mpi)")
    parser.add_argument("--rows", type=int, default=1, help="answers at once (default 1)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of both engines (default 5)")
    given = parser.parse_args(argv)
    taken = taken_apart(given.model, given.hosts, given.rows, given.tokens, given.rounds)
    title = f"{given.model} by --hosts {given.hosts}, {given.rows} rows, the median of {given.rounds} rounds:"
    print(report(taken, title))


if __name__ == "__main__":
    main()
