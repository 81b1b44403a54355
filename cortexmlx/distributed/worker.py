"""A worker: one rank of a group. `python -m cortexmlx.distributed.worker`, which MLX's launcher runs on every host.

It connects to its controller, meets the other ranks, and carries out the controller's calls until the link ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from cortexmlx.cpu import blas
from cortexmlx.distributed.launch.assignment import CONTROLLER_LOST, MEET, READY, Assignment, rank, take_key, versions
from cortexmlx.distributed.links.join import end_process_when_lost, join
from cortexmlx.errors import CortexError, HostLost, HostRefused

if TYPE_CHECKING:
    import mlx.core as mx

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run until the controller asks to end, or is lost. Returns the exit code."""
    here = -1
    try:
        here = rank()
        return _run(Assignment.read(), here, take_key(os.environ, sys.stdin))
    except CortexError as error:
        print(f"rank {here}: {error}", file=sys.stderr, flush=True)
        return 1


def end_with_parent() -> None:
    """End this process when the launcher that started it ends, where the system can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def meet_the_others(task: Assignment, here: int) -> mx.distributed.Group:
    """Form MLX's group of all ranks, and return it. Other threads of this process wait meanwhile: `init` holds Python's
    lock. Raises HostRefused.
    """
    import mlx.core as mx

    if task.ranks == 1:
        os.environ.pop("MLX_HOSTFILE", None)  # the launcher's is empty, which MLX takes for a mistake
        return mx.distributed.init()
    library = task.backend.removesuffix("-ring")
    if not mx.distributed.is_available(library):
        raise HostRefused(f"this MLX cannot use {task.backend} on this machine: {_MISSING.get(library, 'try another')}")
    try:
        group = mx.distributed.init(strict=True, backend=library)
    except (RuntimeError, ValueError) as error:
        raise HostRefused(f"the ranks cannot reach each other by {task.backend}: {error}") from None
    if (group.rank(), group.size()) != (here, task.ranks):
        raise HostRefused(f"rank {here} of {task.ranks} is rank {group.rank()} of {group.size()} by {task.backend}")
    return group


def _run(task: Assignment, here: int, key: bytes) -> int:
    end_with_parent()
    blas.preload()
    from cortexmlx.distributed.rank import open_rank  # imports mlx, which takes a while: the link begins after it
    from cortexmlx.distributed.rank_server import serve

    link = join(task.addresses, key, task.epoch, here, versions(), deadline=time.monotonic() + task.seconds)
    end_process_when_lost(link)
    try:
        if link.receive() != MEET:
            raise HostRefused("the controller runs another version than this worker")
        group = meet_the_others(task, here)
        link.send(READY)
        serve(link, partial(open_rank, group=group))
    except HostLost:
        if link.lost is None:
            raise
        return CONTROLLER_LOST
    return 0


_MISSING = {
    "mpi": "install Open MPI; MLX_MPI_LIBNAME names its library",
    "jaccl": "it needs macOS 26.2, Thunderbolt 5 and `rdma_ctl enable` in recovery mode",
}


if __name__ == "__main__":
    sys.exit(main())
