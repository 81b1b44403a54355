"""What plans and sockets cost: `python -m cortexmlx.bench.studies.hosts.wire`. It needs no model.

First each kind of message alone: its bytes, and the time to encode it, to send it over a socket pair and to decode it.
Then whole steps of 20 ms with ranks in processes of their own that sleep instead of computing: how much longer than the
sleep a step takes. The plans are those of a real scheduler.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from cortexmlx.bench.studies.hosts.sleeping_rank import SleepingRunner, SocketChannel, start
from cortexmlx.execution.boundary import MemoryInUse, Runner, StepResult
from cortexmlx.hosts.options import RankOptions
from cortexmlx.hosts.remote_runner import RemoteRunner
from cortexmlx.hosts.wire.messages import ANSWER, CALL, Answer, Call, Collect, Dispatch, Prepare, RankState
from cortexmlx.hosts.wire.window_step import WindowStep, window_step
from cortexmlx.kv.blocks.pools import BlockPools
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.spec import DEFAULT_BLOCK_SIZE, TAIL_COLUMNS, KVSpec, group_layers
from cortexmlx.request import QueuedRequest
from cortexmlx.sampling_params import SamplingParams
from cortexmlx.scheduling.config import SchedulerConfig
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.scheduler import Scheduler
from cortexmlx.scheduling.steps.plan import StepKind, StepPlan

ROWS = 16
CONTEXT = 4096
STEP = 0.020
"""Seconds of a step."""
_GROUPS = group_layers([KVSpec(8, 128, 128, "float16")])
_SAMPLING = SamplingParams(max_tokens=1 << 16, ignore_eos=True, temperature=0.7, top_p=0.9)
_OPTIONS = RankOptions("sleep", None, False, None, None, DEFAULT_BLOCK_SIZE, "auto", False, ROWS, 512)


@dataclass(frozen=True)
class MessageCost:
    """A message, and the median microseconds that it takes."""

    name: str
    bytes: int
    encode: float
    send: float
    """To the other end of a socket pair in the same process, received there."""
    decode: float

    @property
    def total(self) -> float:
        """All of it, one after the other."""
        return self.encode + self.send + self.decode

    @property
    def share(self) -> float:
        """Percent of a step."""
        return self.total / STEP / 1e4


@dataclass(frozen=True)
class StepsCost:
    """Steps with sleeping ranks."""

    ranks: int
    seconds: float
    """A step of the median decode window, whose first one is prepared, and sent with all block tables."""
    alone: float
    """The same in one process, with the same runner."""
    build: float
    """How long the controller takes for a step to make bytes and to send them, on average."""

    @property
    def added(self) -> float:
        """Percent of a step that plans and sockets add."""
        return 100 * (self.seconds - self.alone) / STEP


class Steps:
    """A scheduler with some rows that decode at a context of so many tokens."""

    def __init__(self, rows: int, context: int) -> None:
        self._rows, self._context = rows, context
        blocks = rows * (2 * context // DEFAULT_BLOCK_SIZE + 64)
        cache = KVCache(BlockPools(_GROUPS, blocks, DEFAULT_BLOCK_SIZE))
        self.blocks = cache.pools.blocks
        config = SchedulerConfig(max_rows=rows, prefill_budget=512, context_length=1 << 20, token_target=None)
        self._scheduler = Scheduler(cache, config)
        self._random = np.random.default_rng(0)
        self._in_flight: deque[StepPlan] = deque()
        for request in range(rows):
            self._add(request)

    def _add(self, request: int) -> None:
        ids = tuple(self._random.integers(0, 50_000, self._context).tolist())
        self._scheduler.add(JobId(request), QueuedRequest(ids, _SAMPLING), frozenset())

    def next(self, started: Callable[[StepPlan], object], ended: Callable[[], object]) -> StepPlan | None:
        """Plan and start a step, and end the one before it, as the engine does. Return the plan."""
        plan = self._scheduler.plan(len(self._in_flight))
        if plan is not None:
            self._in_flight.append(plan)
            started(plan)
        if self._in_flight and (plan is None or len(self._in_flight) > 1):
            done = self._in_flight.popleft()
            ended()
            self._scheduler.commit(done, [7] * len(done.logit_rows))
        return plan

    def plans(self) -> tuple[StepPlan, StepPlan, StepPlan, StepPlan]:
        """Return a step with the last piece of a prompt beside decoding rows, the first step of a window, and two
        further ones.
        """
        mixed = first = before = None
        while True:
            plan = self.next(lambda plan: None, lambda: None)
            if plan is None or len(plan.segments) < self._rows:
                continue
            if plan.kind is StepKind.MIXED:
                mixed = plan
            elif plan.groups is not None:
                first = plan
            elif plan.column == 2 and mixed is not None and first is not None and first.flush is not None:
                assert before is not None
                return mixed, first, before, plan
            before = plan


def message_costs(repeats: int) -> list[MessageCost]:
    """Measure each kind of message."""
    mixed, first, before, plan = Steps(ROWS, CONTEXT).plans()
    held = MemoryInUse(1 << 34, 1 << 24, 0, 1 << 36, 1 << 36)
    state = RankState(held, (4096,), 12.5, 13.5)
    result = Answer(1 << 20, StepResult(STEP, list(range(30_000, 30_000 + ROWS))), state)

    def encoded_step() -> bytearray:
        step = window_step(before, plan)
        assert step is not None
        return CALL.encode(Call(1 << 20, Dispatch(step)))

    def decoded_step(message: bytes) -> StepPlan:
        call = CALL.decode(message).asks
        assert isinstance(call, Dispatch) and isinstance(call.plan, WindowStep)
        return call.plan.after(before)

    others = {
        "the first step of a window": Call(1 << 20, Prepare(first)),
        f"a prompt's piece and {ROWS - 1} rows": Call(1 << 20, Dispatch(mixed)),
        "collect": Call(1 << 20, Collect(True)),
    }
    return [
        _message_cost("a step within a window", encoded_step, decoded_step, repeats),
        *(_message_cost(n, partial(CALL.encode, call), CALL.decode, repeats) for n, call in others.items()),
        _message_cost(f"answer: {ROWS} tokens", partial(ANSWER.encode, result), ANSWER.decode, repeats),
    ]


def _message_cost(
    name: str, encode: Callable[[], bytearray], decode: Callable[[bytes], object], repeats: int
) -> MessageCost:
    ends = [SocketChannel(name, end) for end in socket.socketpair()]
    seconds: list[list[float]] = [[], [], []]
    for _ in range(repeats):
        times = [time.perf_counter()]
        message = encode()
        times.append(time.perf_counter())
        ends[0].send(message)
        received = ends[1].receive()
        times.append(time.perf_counter())
        decode(received)
        times.append(time.perf_counter())
        for figures, (begin, end) in zip(seconds, pairwise(times), strict=True):
            figures.append(end - begin)
    for channel in ends:
        channel.close()
    return MessageCost(name, len(message), *(1e6 * statistics.median(each) for each in seconds))


def steps_cost(ranks: int, windows: int) -> StepsCost:
    """Measure steps with so many sleeping ranks, and without."""
    started = [start(STEP) for _ in range(ranks)]
    runner = RemoteRunner([channel for channel, _ in started], [channel.name for channel, _ in started])
    try:
        runner.open(_OPTIONS)
        runner.arrange([_GROUPS] * ranks)
        seconds, build = _step_of_windows(runner, windows)
    finally:
        runner.close()
        for _, process in started:
            process.wait()
    alone, _ = _step_of_windows(SleepingRunner(STEP, len(_GROUPS)), windows)
    return StepsCost(ranks, seconds, alone, build)


def _step_of_windows(runner: Runner, windows: int) -> tuple[float, float]:
    """Return the seconds of a step, by the median decode window, and how many of them `runner` built, by the mean."""
    driven = Steps(ROWS, CONTEXT)
    runner.begin(driven.blocks)
    times: list[float] = []
    steps, built = 0, runner.build_seconds
    while len(times) <= windows:
        plan = driven.next(runner.dispatch, runner.collect)
        if plan is None or len(plan.segments) != ROWS or plan.kind is not StepKind.DECODE:
            continue
        if plan.column == 1:
            times.append(time.perf_counter())
        if len(times) == 1 and plan.column == 1:
            built = runner.build_seconds
        steps += len(times) > 0
    return statistics.median(b - a for a, b in pairwise(times)) / TAIL_COLUMNS, (runner.build_seconds - built) / steps


def report(messages: Sequence[MessageCost], steps: Sequence[StepsCost]) -> str:
    """Return the figures as Markdown tables."""
    lines = [
        f"{ROWS} rows with a context of {CONTEXT} tokens; microseconds, medians; percent of a step of "
        f"{1000 * STEP:.0f} ms:",
        "",
        "| message | bytes | encode | send | decode | percent |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for m in messages:
        lines.append(f"| {m.name} | {m.bytes:,} | {m.encode:.0f} | {m.send:.0f} | {m.decode:.0f} | {m.share:.2f} |")
    lines += ["", "| sleeping ranks | ms a step | in one process | added, percent | making and sending, ms |"]
    lines.append("|---:|---:|---:|---:|---:|")
    for s in steps:
        figures = f"{1e3 * s.seconds:.3f} | {1e3 * s.alone:.3f} | {s.added:.2f} | {1e3 * s.build:.3f}"
        lines.append(f"| {s.ranks} | {figures} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m cortexmlx.bench.studies.hosts.wire", description=__doc__)
    parser.add_argument("--repeats", type=int, default=500, help="times that each message is measured (default 500)")
    parser.add_argument("--windows", type=int, default=16, help="decode windows with sleeping ranks (default 16)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="how many ranks (default 1 2)")
    given = parser.parse_args(argv)
    print(report(message_costs(given.repeats), [steps_cost(ranks, given.windows) for ranks in given.ranks]))


if __name__ == "__main__":
    main()
