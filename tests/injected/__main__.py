"""End, stop and starve the processes of an engine on hosts, and see that it goes on.

    python -m tests.injected [--runs N] [--seed S]

Each run opens a tiny model in two processes of this machine by MPI, has three requests, and does one thing to one
process at one moment. Then every request must end within a limit, with the tokens of one process or with HostLost; a
new request must be answered right; and after the engine is closed no process may be left. Prints each run. Exit status
1 if one has failed.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest does

from support.hosts.launch.processes import commands, workers

LIMIT = 10.0
"""Seconds from the fault to the end of every request, without `resume_lost`."""

AGAIN = 120.0
"""Seconds until requests that begin again have ended: the workers are started anew, on a machine of two cores."""

STOPPED = 30.0
"""Seconds from SIGSTOP to SIGCONT."""

HEADROOM = 1 << 20
"""Bytes that a process whose memory is refused still gets."""

MOMENTS = ("loading", "prefill", "decode", "idle")

PROMPTS = (700, 20, 45)
"""Tokens of the prompts. The first is computed in many pieces."""


def killed(victim: int, link: Any) -> None:
    """kill -9."""
    os.kill(victim, signal.SIGKILL)


def stopped(victim: int, link: Any) -> None:
    """SIGSTOP, and SIGCONT later."""

    def go_on() -> None:
        with suppress(ProcessLookupError):  # it was ended meanwhile, as it should be
            os.kill(victim, signal.SIGCONT)

    os.kill(victim, signal.SIGSTOP)
    threading.Timer(STOPPED, go_on).start()


def closed(victim: int, link: Any) -> None:
    """The socket is shut down, as a network that breaks does it."""
    for connection in link._link._sockets:
        with suppress(OSError):  # the link itself was faster with the second one
            connection.shutdown(2)


def starved(victim: int, link: Any) -> None:
    """The system gives the process no more memory."""
    pages = int(Path(f"/proc/{victim}/statm").read_text().split()[0])
    bound = pages * resource.getpagesize() + HEADROOM
    resource.prlimit(victim, resource.RLIMIT_AS, (bound, bound))


FAULTS = (killed, stopped, closed, starved)


class Run:
    """One run: `fault` comes to the worker of `rank` at a moment."""

    def __init__(self, model: Path, fault: Callable[[int, Any], None], moment: str, rank: int, resume: bool) -> None:
        self.model, self.fault, self.moment, self.rank, self.resume = model, fault, moment, rank, resume
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
            self._no_process_is_left(before)
            assert ended - self.at < AGAIN
            return said
        with engine:
            handles = [engine.submit(p, max_tokens=120, ignore_eos=True) for p in prompts]
            if self.moment == "decode":
                next(iter(handles[0]))
            elif self.moment == "idle":
                for handle in handles:
                    handle.result(AGAIN)
            if self.moment == "loading":
                early.join()  # the engine may open before its fault comes
            else:
                self._inject(workers(before)[self.rank], engine)
            lost_answers = 0
            for handle, right in zip(handles, expected, strict=True):
                try:
                    assert handle.result(AGAIN).token_ids == right, "other tokens"
                except HostLost:
                    lost_answers += 1
            took = time.monotonic() - self.at
            assert lost_answers == 0 or not self.resume, "resumed requests were lost"
            assert took < (AGAIN if self.resume or not lost_answers else LIMIT), (
                f"the requests ended after {took:.1f} s"
            )
            if self.moment in ("idle", "loading"):
                self._await_loss(engine)
            again = engine.submit(prompts[1], max_tokens=120, ignore_eos=True).result(AGAIN).token_ids
            assert again == expected[1], "the next request got other tokens"
            losses = engine.stats().host_losses
        self._no_process_is_left(before)
        return f"{lost_answers} of {len(prompts)} lost after {took:.1f} s, {losses} losses"

    def _inject(self, victim: int, engine: Any) -> None:
        self.at = time.monotonic()
        link = engine._worker.core.model._group._workers.channels[self.rank]
        self.fault(victim, link)

    def _inject_early(self, before: set[int]) -> None:
        until = time.monotonic() + AGAIN
        while len(found := workers(before)) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(random.Random(str(self)).uniform(0, 3))
        self.at = time.monotonic()
        self.fault(found[self.rank], None)

    def _await_loss(self, engine: Any) -> None:
        """Nobody asks the workers anything now. Their loss must be noticed all the same, unless memory is short, or
        they began only after they had been stopped.
        """
        until = self.at + LIMIT
        while not engine.stats().host_losses and time.monotonic() < until:
            time.sleep(0.05)
        quiet = self.fault is starved or self.moment == "loading"
        assert engine.stats().host_losses or quiet, "nobody noticed the loss"

    def _no_process_is_left(self, before: set[int]) -> None:
        until = time.monotonic() + LIMIT
        while workers(before) and time.monotonic() < until:
            time.sleep(0.05)
        assert not workers(before), f"processes are left: {workers(before)}"


def main() -> int:
    from cortexmlx import Engine
    from support.hosts.environment import with_mpi
    from support.models.tiny import tokens_of, write_tiny

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kinds = [
        each
        for each in product(FAULTS, MOMENTS, (0, 1), (False, True))
        if each[1] != "loading" or each[0] in (killed, stopped)  # there is no link yet, and no memory was measured
    ]
    random.Random(options.seed).shuffle(kinds)
    failed = 0
    with tempfile.TemporaryDirectory() as root, with_mpi(Path(root) / "bin"):
        model = write_tiny(Path(root) / "model", max_position_embeddings=2048)
        prompts = [tokens_of(length, seed=length) for length in PROMPTS]
        with Engine(str(model), kv_memory="8MB", prefill_budget=32) as engine:
            expected = [engine.generate(p, max_tokens=120, ignore_eos=True).token_ids for p in prompts]
        for number in range(options.runs):
            run = Run(model, *kinds[number % len(kinds)])
            try:
                print(f"{number}: {run}: {run.carry_out(prompts, expected)}", flush=True)
            except Exception:
                failed += 1
                print(f"{number}: FAILED: {run}\n{traceback.format_exc()}", flush=True)
    print(f"{options.runs} runs, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
