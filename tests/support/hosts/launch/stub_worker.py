"""A worker without a model: it joins its controller, and answers each message with its rank, its process and that
message. Its argument says what goes wrong, or that it is to meet the other ranks by MLX.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from cortexmlx.distributed.launch.assignment import (
    CONTROLLER_LOST,
    MEET,
    READY,
    WorkerAssignment,
    package_versions,
    read_key,
    read_rank,
)
from cortexmlx.distributed.worker import end_process_when_lost, end_with_parent, init_mlx_group, join_controller
from cortexmlx.errors import HostLost


def main(fault: str) -> None:
    """Join and answer, or go wrong."""
    end_with_parent()
    here = read_rank()
    if fault == "deaf":
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    task = WorkerAssignment.from_environment()
    key = read_key(os.environ, sys.stdin)
    if fault == "never-joins":
        time.sleep(600)
    if fault == "exits" and here == 1:
        sys.exit("rank 1: no module named weights")
    if fault == "exits-with-0" and here == 1:
        sys.exit()
    if fault == "garbage":
        os.write(1, os.urandom(200_000) + b"\x1b[2J\r\n" + key.hex().encode() + b"\n" + b"x" * 100_000)
    if fault == "another-version":
        identity = package_versions() | {"mlx": "0.0.1"}
    else:
        identity = package_versions()
    link = join_controller(task.addresses, key, task.epoch, here, identity, deadline=time.monotonic() + task.seconds)
    if fault != "deaf":
        end_process_when_lost(link)
    assert link.receive() == MEET
    if fault == "meets":
        init_mlx_group(task, here)
    link.send(b"strange" if fault == "strange" else READY)
    try:
        while True:
            message = link.receive()
            link.send(b"%d %d %s" % (here, os.getpid(), message))
    except HostLost:
        if fault == "deaf":
            time.sleep(600)
        sys.exit(CONTROLLER_LOST)


if __name__ == "__main__":
    main(sys.argv[1])
