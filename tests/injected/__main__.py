"""End, stop, hang and starve the processes of an engine on hosts, and see that it goes on.

    python -m tests.injected [--runs N] [--seed S] [--only TEXT]

Each run opens a tiny model in two processes of this machine by MPI, has three requests, and does one thing to one
process at one moment. Then every request must end within a limit, with the tokens of one process or with HostLost; a
new request must be answered right; and after the engine is closed no process, port, temporary file or shared memory may
be left.

Then the controller is killed at each moment, by MPI and by the ring, and nothing may be left either (`--only
controller` does that alone). Prints each run. Exit status 1 if one has failed.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest does

from support.hosts.launch import hanging_worker
from support.hosts.launch.leftovers import Held
from support.hosts.launch.processes import commands, workers

LIMIT = 10.0
"""Seconds from the fault to the end of every request, without `resume_lost`."""

AGAIN = 120.0
"""Seconds until requests that begin again have ended: the workers are started anew, on a machine of two cores."""

STOPPED = 30.0
"""Seconds from SIGSTOP to SIGCONT."""

HEADROOM = 1 << 20
"""Bytes that a process whose memory is refused still gets."""

MOMENTS = ("loading", "prefill", "decode", "idle", "asked")
"""`asked`: the engine is idle, and is asked at once after the fault, before anybody can have noticed it."""

PROMPTS = (700, 20, 45)
"""Tokens of the prompts. The first is computed in many pieces."""


@dataclass(frozen=True)
class Victim:
    """A worker to which something happens."""

    pid: int
    rank: int
    link: Any
    """The channel to it; None while it starts."""
    folder: Path
    """Where `hanging_worker` looks for files."""


def killed(victim: Victim) -> None:
    """kill -9."""
    os.kill(victim.pid, signal.SIGKILL)


def stopped(victim: Victim) -> None:
    """SIGSTOP, and SIGCONT later."""

    def go_on() -> None:
        with suppress(ProcessLookupError):  # it was ended meanwhile, as it should be
            os.kill(victim.pid, signal.SIGCONT)

    os.kill(victim.pid, signal.SIGSTOP)
    threading.Timer(STOPPED, go_on).start()


def hung(victim: Victim) -> None:
    """Its next step never ends, and its heartbeats go on."""
    hanging_worker.flag(victim.folder, victim.rank).touch()


def closed(victim: Victim) -> None:
    """The socket is shut down, as a network that breaks does it."""
    for connection in victim.link._link._sockets:
        with suppress(OSError):  # the link itself was faster with the second one
            connection.shutdown(2)


def starved(victim: Victim) -> None:
    """The system gives the process no more memory."""
    pages = int(Path(f"/proc/{victim.pid}/statm").read_text().split()[0])
    bound = pages * resource.getpagesize() + HEADROOM
    resource.prlimit(victim.pid, resource.RLIMIT_AS, (bound, bound))


FAULTS = (killed, stopped, closed, starved, hung)

HARMLESS = {"loading": (closed, starved, hung), "idle": (hung,)}
"""Faults that do not exist at a moment: there is no link yet, and no memory was measured; who has nothing to do does
not hang.
"""


class Run:
    """One run: `fault` comes to the worker of `rank` at a moment."""

    def __init__(self, model: Path, fault: Callable[[Victim], None], moment: str, rank: int, resume: bool) -> None:
        self.model, self.fault, self.moment, self.rank, self.resume = model, fault, moment, rank, resume
        self.held = Held()
        self.at = 0.0
        """When the fault came."""

    def __str__(self) -> str:
        return f"rank {self.rank} {self.fault.__name__} at {self.moment}{', resumed' * self.resume}"

    def carry_out(self, prompts: list[list[int]], expected: list[tuple[int, ...]]) -> str:
        """Return what happened, in words. Raises AssertionError."""
        from cortexmlx import Engine
        from cortexmlx.errors import HostLost

        before = set(commands())
        early = threading.Thread(target=self._inject_early, args=(before,), daemon=True)
        try:
            if self.moment == "loading":
                early.start()
            engine = Engine(str(self.model), hosts="2:mpi", resume_lost=self.resume, kv_memory="8MB", prefill_budget=32)
        except HostLost as lost:
            assert self.moment == "loading", lost
            said, ended = f"not opened: {lost}", time.monotonic()
            nothing_is_left(self.held)
            assert ended - self.at < AGAIN
            return said
        with engine:
            self.held.look(before)
            if self.fault is hung:
                self._learn(engine)
            if self.moment == "asked":
                engine.generate(prompts[0], max_tokens=5)
                self._inject(workers(before)[self.rank], engine)
            handles = [engine.submit(p, max_tokens=120, ignore_eos=True) for p in prompts]
            if self.moment == "decode":
                next(iter(handles[0]))
            elif self.moment == "idle":
                for handle in handles:
                    handle.result(AGAIN)
            if self.moment == "loading":
                early.join()  # the engine may open before its fault comes
            elif self.moment != "asked":
                self._inject(workers(before)[self.rank], engine)
            with ThreadPoolExecutor() as waiting:
                ends = list(waiting.map(self._end, handles, expected))
            lost = [(seconds, host) for seconds, host in ends if host is not None]
            took, failed = (max((seconds for seconds, _ in some), default=0.0) for some in (ends, lost))
            assert not (lost and self.resume), "resumed requests were lost"
            assert took < AGAIN and failed < LIMIT, (
                f"requests failed after {failed:.1f} s, all ended after {took:.1f} s"
            )
            named = {host for _, host in lost if host}
            blamed = {host for host in named if not host.endswith(f"rank {self.rank}")}
            assert self.fault is not hung or not blamed, f"{blamed} were named"
            if self.moment in ("idle", "loading"):
                self._await_loss(engine)
            if self.fault is hung:
                assert engine.stats().host_losses == 1, "it does not hang"
            self.held.look(before)
            again = engine.submit(prompts[1], max_tokens=120, ignore_eos=True).result(AGAIN).token_ids
            assert again == expected[1], "the next request got other tokens"
            losses = engine.stats().host_losses
        nothing_is_left(self.held)
        who = f" by {' and '.join(named) or 'nobody'} within {failed:.1f} s" if lost else ""
        return f"{len(lost)} of {len(prompts)} lost{who}, all ended after {took:.1f} s, {losses} losses"

    def _end(self, handle: Any, right: tuple[int, ...]) -> tuple[float, str | None]:
        """Wait for an answer. Return when it ended, and who was lost if it failed; "" if that is not known."""
        from cortexmlx.errors import HostLost

        try:
            assert handle.result(AGAIN).token_ids == right, "other tokens"
        except HostLost as lost:
            return time.monotonic() - self.at, lost.host or ""
        return time.monotonic() - self.at, None

    def _inject(self, victim: int, engine: Any) -> None:
        self.at = time.monotonic()
        link = engine._worker.core.model._group._workers.channels[self.rank]
        self.fault(Victim(victim, self.rank, link, self.model.parent))

    def _learn(self, engine: Any) -> None:
        """Let the engine know how long steps take, with prompts of which nothing is in its cache then."""
        from support.models.tiny import tokens_of

        known = [engine.submit(tokens_of(n, seed=9000 + n), max_tokens=60, ignore_eos=True) for n in PROMPTS]
        for handle in known:
            handle.result(AGAIN)

    def _inject_early(self, before: set[int]) -> None:
        until = time.monotonic() + AGAIN
        while len(found := workers(before)) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(random.Random(str(self)).uniform(0, 3))
        self.held.look(before)
        self.at = time.monotonic()
        self.fault(Victim(found[self.rank], self.rank, None, self.model.parent))

    def _await_loss(self, engine: Any) -> None:
        """Nobody asks the workers anything now. Their loss must be noticed all the same, unless memory is short, or
        they began only after they had been stopped.
        """
        until = self.at + LIMIT
        while not engine.stats().host_losses and time.monotonic() < until:
            time.sleep(0.05)
        quiet = self.fault is starved or self.moment == "loading"
        assert engine.stats().host_losses or quiet, "nobody noticed the loss"


def nothing_is_left(held: Held) -> None:
    """Everything that was held is gone within the limit. Raises AssertionError."""
    until = time.monotonic() + LIMIT
    while (left := held.left()) and time.monotonic() < until:
        time.sleep(0.05)
    assert held.processes and not left, f"left: {left}"


def without_controller(model: Path, hosts: str, moment: str, later: float) -> str:
    """Kill a controller so many seconds after a moment. Return what happened, in words. Raises AssertionError."""
    before, held = set(commands()), Held()
    command = [sys.executable, "-m", "tests.injected.controller", str(model), hosts, moment]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == f"at {moment}\n"
            until = time.monotonic() + AGAIN
            while moment == "loading" and len(workers(before)) < 2 and time.monotonic() < until:
                time.sleep(0.01)
            until = time.monotonic() + later
            while time.monotonic() < until:
                held.look(before)
                time.sleep(0.05)
            held.look(before)
        finally:
            process.kill()
    at = time.monotonic()
    nothing_is_left(held)
    counts = f"{len(held.processes)} processes, {len(held.ports)} ports, {len(held.files)} files"
    return f"{counts} gone after {time.monotonic() - at:.1f} s"


def main() -> int:
    from cortexmlx import Engine
    from cortexmlx.distributed import group
    from cortexmlx.distributed.worker_group import WorkerGroup
    from support.hosts.environment import with_mpi
    from support.models.tiny import tokens_of, write_tiny

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only runs whose name has this text")
    options = parser.parse_args()
    kinds = [
        each for each in product(FAULTS, MOMENTS, (0, 1), (False, True)) if each[0] not in HARMLESS.get(each[1], ())
    ]
    random.Random(options.seed).shuffle(kinds)
    failed = 0
    with tempfile.TemporaryDirectory() as root, with_mpi(Path(root) / "bin"):
        model = write_tiny(Path(root) / "model", max_position_embeddings=2048)
        prompts = [tokens_of(length, seed=length) for length in PROMPTS]
        with Engine(str(model), kv_memory="8MB", prefill_budget=32) as engine:
            expected = [engine.generate(p, max_tokens=120, ignore_eos=True).token_ids for p in prompts]
        os.environ[hanging_worker.FOLDER] = root
        group.WorkerGroup = partial(WorkerGroup, worker=hanging_worker.COMMAND)  # type: ignore[assignment, misc]
        every: list[tuple[str, Callable[[], str]]] = []
        for number in range(options.runs):
            run = Run(model, *kinds[number % len(kinds)])
            every.append((str(run), partial(run.carry_out, prompts, expected)))
        for hosts, moment in product(("2:mpi", "2"), MOMENTS[:4]):
            name = f"controller of {hosts} killed at {moment}"
            later = random.Random(name).uniform(0, 3 if moment == "loading" else 0.3)
            every.append((name, partial(without_controller, model, hosts, moment, later)))
        chosen = [(name, carry_out) for name, carry_out in every if options.only in name]
        for number, (name, carry_out) in enumerate(chosen):
            try:
                print(f"{number}: {name}: {carry_out()}", flush=True)
            except Exception:
                failed += 1
                print(f"{number}: FAILED: {name}\n{traceback.format_exc()}", flush=True)
    print(f"{len(chosen)} runs, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
