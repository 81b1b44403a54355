"""A worker: one rank of a group. `python -m cortexmlx.distributed.worker`, which MLX's launcher runs on every host.

It connects to its controller, meets the other ranks, and carries out the controller's calls until the link ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from cortexmlx.cpu import blas
from cortexmlx.distributed.launch.assignment import (
    CONTROLLER_LOST,
    MEET,
    READY,
    WorkerAssignment,
    package_versions,
    read_key,
    read_rank,
    restore_temporary_folder,
)
from cortexmlx.distributed.links.handshake import (
    ConnectionPurpose,
    HandshakeSide,
    Hello,
    Identity,
    check_key,
    introduce_worker,
)
from cortexmlx.distributed.links.link import DEFAULT_LIMITS, LinkLimits, WorkerLink
from cortexmlx.distributed.links.listener import HANDSHAKE_SECONDS, Address
from cortexmlx.errors import CortexError, HostLost, HostRefused
from cortexmlx.mlx_lm.package import load_without_tokenizers

if TYPE_CHECKING:
    import mlx.core as mx

log = logging.getLogger("cortexmlx")

_PR_SET_PDEATHSIG = 1

LONGEST_PAUSE_SECONDS = 1.0
STANDARD_ERROR = 2


def main() -> int:
    """Run this worker until the controller asks it to end, or is lost. Return the exit code."""
    rank = -1
    try:
        rank = read_rank()
        return _run_worker(WorkerAssignment.from_environment(), rank, read_key(os.environ, sys.stdin))
    except CortexError as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        return 1


def end_with_parent() -> None:
    """End this process when the launcher that started it ends, where the system can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


_BACKEND_HINTS = {
    "mpi": "install Open MPI; MLX_MPI_LIBNAME names its library",
    "jaccl": "it needs macOS 26.2, Thunderbolt 5 and `rdma_ctl enable` in recovery mode",
}


def init_mlx_group(task: WorkerAssignment, rank: int) -> mx.distributed.Group:
    """Connect to the other ranks by `mx.distributed.init`, and return MLX's group. Other threads of this process wait
    meanwhile: `init` holds Python's lock. Raises HostRefused.
    """
    import mlx.core as mx

    if task.ranks == 1:
        os.environ.pop("MLX_HOSTFILE", None)  # the launcher's is empty, which MLX takes for a mistake
        return mx.distributed.init()
    library = task.backend.removesuffix("-ring")
    if not mx.distributed.is_available(library):
        raise HostRefused(
            f"this MLX cannot use {task.backend} on this machine: {_BACKEND_HINTS.get(library, 'try another')}"
        )
    try:
        group = mx.distributed.init(strict=True, backend=library)
    except (RuntimeError, ValueError) as error:
        raise HostRefused(f"the ranks cannot reach each other by {task.backend}: {error}") from None
    if (group.rank(), group.size()) != (rank, task.ranks):
        raise HostRefused(f"rank {rank} of {task.ranks} is rank {group.rank()} of {group.size()} by {task.backend}")
    return group


def _run_worker(task: WorkerAssignment, rank: int, key: bytes) -> int:
    """Join the controller, meet the other ranks, and serve calls. Return the exit code."""
    end_with_parent()
    blas.preload()
    load_without_tokenizers()
    from cortexmlx.distributed.rank import open_rank  # imports mlx, which takes a while: the link begins after it
    from cortexmlx.distributed.rank_server import serve

    link = join_controller(
        task.addresses, key, task.epoch, rank, package_versions(), deadline=time.monotonic() + task.seconds
    )
    end_process_when_lost(link)
    try:
        if link.receive() != MEET:
            raise HostRefused("the controller runs another version than this worker")
        group = init_mlx_group(task, rank)
        restore_temporary_folder(os.environ)
        link.send(READY)
        serve(link, partial(open_rank, group=group))
    except HostLost:
        if link.loss_reason is None:
            raise
        return CONTROLLER_LOST
    return 0


# -- the way to the controller ---------------------------------------------------------------------------------------


def join_controller(
    addresses: Sequence[Address],
    key: bytes,
    epoch: int,
    rank: int,
    identity: Identity,
    *,
    deadline: float,
    limits: LinkLimits = DEFAULT_LIMITS,
) -> WorkerLink:
    """Connect to the controller at one of `addresses`, with retries until `deadline` (of `time.monotonic`).

    Heartbeats need Python's lock. `mx.eval` gives it up while it waits. `mx.distributed.init` holds it until all ranks
    are there, so call that when the controller, who sees that all have joined, says so. `mx.clear_cache` holds it while
    a step is in flight on a CPU, and `mx.save` while it computes what it saves.

    Raises HostRefused if the controller refuses this worker or has another key, HostLost if none can be reached.
    """
    check_key(key)
    pause = 0.05
    problem = "there is no address to try"
    while True:
        for address in addresses:
            try:
                return _connect_once(address, key, epoch, rank, identity, deadline, limits)
            except OSError as error:
                problem = f"{_address_text(address)}: {error}"
            except HostRefused as error:
                raise HostRefused(
                    f"rank {rank} cannot join the controller at {_address_text(address)}: {error}"
                ) from error
        if addresses:
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        if not addresses or time.monotonic() >= deadline:
            raise HostLost(f"rank {rank} could not join its controller in time. The last problem is {problem}")
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def end_process_when_lost(link: WorkerLink, *, grace: float = 3.0) -> None:
    """End this process `grace` seconds after `link` is lost, unless it has ended by itself. End it also when no Python
    thread could run for so long that the controller counts it as lost. For a worker after `join_controller`: a rank
    that waits in a collective cannot be interrupted, and must not outlive its controller.

    The process ends by a thread of faulthandler, which needs no lock of Python, and says where each thread was.
    """
    lost_event = threading.Event()

    def begin_grace(error: HostLost) -> None:
        log.info("this worker ends: %s", error)
        lost_event.set()

    def postpone_end_while_connected() -> None:
        while not lost_event.is_set():
            _end_process_after(link.limits.silence_seconds + grace)
            lost_event.wait(link.limits.beat_seconds)
        _end_process_after(grace)

    link.when_lost(begin_grace)
    threading.Thread(target=postpone_end_while_connected, name="end of a worker", daemon=True).start()


def _end_process_after(seconds: float) -> None:
    """Have faulthandler end this process after `seconds`. Replaces the time of an earlier call."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=STANDARD_ERROR)


def _connect_once(
    address: Address, key: bytes, epoch: int, rank: int, identity: Identity, deadline: float, limits: LinkLimits
) -> WorkerLink:
    """Open both connections to the controller at one address, and return their link. Raises OSError or HostRefused."""
    session = secrets.token_bytes(16)
    with contextlib.ExitStack() as exit_stack:

        def connect(purpose: ConnectionPurpose) -> socket.socket:
            handshake_deadline = min(deadline, time.monotonic() + HANDSHAKE_SECONDS)
            connection = exit_stack.enter_context(
                socket.create_connection(address, timeout=_seconds_left(handshake_deadline))
            )
            if connection.getsockname() == connection.getpeername():
                raise OSError("nobody listens there")  # A port of this machine that met itself.
            try:
                _run_handshake(
                    connection,
                    introduce_worker(key, Hello(purpose, rank, epoch, session), identity),
                    handshake_deadline,
                )
            except (ConnectionError, EOFError) as error:
                raise OSError("it closed the connection. Does the host file name this machine?") from error
            return connection

        messages, pulse = connect(ConnectionPurpose.MESSAGES), connect(ConnectionPurpose.HEARTBEATS)
        link = WorkerLink(messages, pulse, f"the controller at {_address_text(address)}", limits)
        exit_stack.pop_all()
        return link


def _run_handshake(connection: socket.socket, talk: HandshakeSide[None], deadline: float) -> None:
    """Run this side of a handshake on a connection, until the time `deadline`."""
    with contextlib.suppress(StopIteration):
        wish = next(talk)
        while True:
            connection.settimeout(_seconds_left(deadline))
            if isinstance(wish, bytes):
                connection.sendall(wish)
                wish = next(talk)
            else:
                wish = talk.send(_receive_exactly(connection, wish, deadline))


def _receive_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Receive `count` bytes. Raises EOFError if the connection ends before."""
    data = b""
    while len(data) < count:
        connection.settimeout(_seconds_left(deadline))
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _seconds_left(deadline: float) -> float:
    """Return the seconds until a time. Raises TimeoutError if there are none."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("timed out")
    return remaining


def _address_text(address: Address) -> str:
    """Return an address as `host:port`."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


if __name__ == "__main__":
    sys.exit(main())
