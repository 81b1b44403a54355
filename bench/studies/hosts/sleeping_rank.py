"""A rank that sleeps instead of computing, in a process of its own: what is left of a step's time is what plans and
sockets add. `python -m cortexmlx.bench.studies.hosts.sleeping_rank FD SECONDS` serves a socket that it inherits.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import MutableMapping, Sequence

from cortexmlx.errors import HostLost
from cortexmlx.execution.boundary import Arrays, MemoryInUse, RankRunner, Refused, Shapes, StepResult, TokenMask
from cortexmlx.hosts.channel import Message
from cortexmlx.hosts.options import RankInfo, RankOptions
from cortexmlx.hosts.rank_server import serve
from cortexmlx.kv.spec import Counts, LayerGroup
from cortexmlx.kv.state.snapshots import StateOps
from cortexmlx.kv.step import BlockCopy
from cortexmlx.sampling_params import LogitsProcessor
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.steps.plan import StepPlan
from cortexmlx.stats import CommandBuffers

_SIZE = struct.Struct("<Q")


class SocketChannel:
    """A channel over one end of a socket pair: eight bytes of size, then the message."""

    def __init__(self, name: str, end: socket.socket) -> None:
        self.name = name
        self.lost: str | None = None
        self.processor_seconds: float | None = None
        self.silent_seconds = 0.0
        self._end = end

    def send(self, message: Message) -> None:
        """See `Channel`, as for the other methods."""
        self._end.sendall(_SIZE.pack(len(message)) + message)

    def receive(self, timeout: float | None = None) -> bytes:
        """Wait for the next message."""
        return self._exactly(_SIZE.unpack(self._exactly(_SIZE.size))[0])

    def close(self) -> None:
        """End the connection."""
        self._end.close()

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self._end.recv(count - len(parts))
            except OSError as error:
                raise HostLost(str(error), host=self.name) from error
            if not part:
                raise HostLost("the connection is closed", host=self.name)
            parts += part
        return bytes(parts)


class SleepingRunner:
    """A runner whose steps take so many seconds each, one after the other, as on a GPU: they begin when they are
    dispatched, and are waited for when they are collected. `wait_seconds` is how long it slept.
    """

    def __init__(self, seconds: float, groups: int) -> None:
        self.processors: MutableMapping[JobId, Sequence[LogitsProcessor]] = {}
        self.build_seconds = self.wait_seconds = 0.0
        self.computes_at_dispatch = False
        self.command_buffers: CommandBuffers | None = None
        self.shapes: Sequence[Shapes] = ((),) * groups
        self.blocks: Counts = (0,) * groups
        self.bytes = MemoryInUse(1 << 30, 1 << 20, 0, 1 << 34, 1 << 34)
        self._seconds = seconds
        self._ends: deque[tuple[float, int]] = deque()
        self._end = 0.0

    def begin(self, blocks: Counts) -> Refused | None:
        """See `Runner`, as for the other methods."""
        self.blocks = blocks
        return None

    def can_resize(self, blocks: Counts) -> bool:
        """Say yes."""
        return True

    def resize(self, blocks: Counts) -> Refused | None:
        """Take a number of blocks."""
        return self.begin(blocks)

    def copy(self, copies: Sequence[BlockCopy]) -> Refused | None:
        """Copy nothing."""
        return None

    def copy_out(self, group: int, names: Sequence[int]) -> Sequence[Arrays | None] | Refused:
        """Return no copies."""
        return [None] * len(names)

    def release(self) -> None:
        """Drop all blocks."""
        self.blocks = (0,) * len(self.blocks)

    def trim(self) -> None:
        """Keep nothing."""

    def prepare(self, plan: StepPlan) -> Refused | None:
        """Take the plan's number of blocks."""
        return self.begin(plan.blocks)

    def dispatch(self, plan: StepPlan) -> Refused | None:
        """Begin a step after those in flight."""
        self._end = max(self._end, time.perf_counter()) + self._seconds
        self._ends.append((self._end, len(plan.logit_rows)))
        return None

    forward = dispatch

    def choose(self, mask: TokenMask | None = None) -> Refused | None:
        """Choose with the forward pass."""
        return None

    def collect(self) -> StepResult | Refused:
        """Sleep until the oldest step is over."""
        end, tokens = self._ends.popleft()
        started = time.perf_counter()
        time.sleep(max(0.0, end - started))
        self.wait_seconds += time.perf_counter() - started
        return StepResult(self._seconds, [7] * tokens)

    def settle(self, ops: StateOps) -> Refused | None:
        """Keep nothing."""
        return None

    def forget(self) -> None:
        """Drop the steps in flight."""
        self._ends.clear()

    def close(self) -> None:
        """Keep nothing."""


class SleepingRank:
    """A part of a model whose steps take so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.info = RankInfo(
            (), 50_000, 1 << 20, 1 << 34, 1, "float16", "sleep", "sleep", (), "", 1 << 35, "none", 1 << 34, 1
        )
        self._seconds = seconds

    def arrange(self, groups: Sequence[LayerGroup]) -> RankRunner:
        """See `OpenedRank`."""
        return SleepingRunner(self._seconds, len(groups))

    def open_store(self, runner: RankRunner, tell: object) -> None:
        """It keeps nothing."""


def start(seconds: float) -> tuple[SocketChannel, subprocess.Popen[bytes]]:
    """Start a rank. Return the channel to it, and its process."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(seconds)]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    return SocketChannel(f"rank {process.pid}", ours), process


def main(fd: str, seconds: str) -> None:
    """Serve an inherited socket."""

    def open_rank(options: RankOptions) -> SleepingRank:
        return SleepingRank(float(seconds))

    serve(SocketChannel("controller", socket.socket(fileno=int(fd))), open_rank)


if __name__ == "__main__":
    main(*sys.argv[1:])
