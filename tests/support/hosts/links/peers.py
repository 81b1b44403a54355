"""Links over the loopback, and workers in processes of their own that answer what they are sent."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from cortexmlx.distributed.links.handshake import new_key
from cortexmlx.distributed.links.link import LinkLimits, WorkerLink
from cortexmlx.distributed.links.listener import Listener
from cortexmlx.distributed.worker import join_controller
from support.patience import PATIENCE

PATIENT = LinkLimits(silence_seconds=PATIENCE, stall_seconds=PATIENCE)
"""Limits of links that no slow machine loses."""

IDENTITY = {"cortexmlx": "0.5.0", "mlx": "0.31.1", "weights": "cafe"}

ECHO = f"""
import ctypes, os, sys, time
from cortexmlx.distributed.worker import end_process_when_lost, join_controller
from cortexmlx.distributed.links.link import LinkLimits
port, silence = int(sys.argv[1]), float(sys.argv[2])
link = join_controller([("127.0.0.1", port)], bytes.fromhex(os.environ["KEY"]), 1, 0, {IDENTITY},
            deadline=time.monotonic() + 600, limits=LinkLimits(silence_seconds=silence, beat_seconds=0.1))
end_process_when_lost(link, grace=0.1)
while (message := link.receive()) not in (b"hang", b"hold"):
    link.send(message)
(time if message == b"hang" else ctypes.PyDLL(None)).sleep(600)
"""
"""A worker that returns each message. After b"hang" it takes no more, like one in a collective that never ends. After
b"hold" it holds Python's lock, too.
"""


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


def link_pair(limits: LinkLimits = PATIENT) -> tuple[WorkerLink, WorkerLink]:
    (one, other), (pulse, other_pulse) = tcp_pair(), tcp_pair()
    return WorkerLink(one, pulse, "one", limits), WorkerLink(other, other_pulse, "other", limits)


class Group:
    """A listener, a thread in its `accept`, and what workers of it are made of."""

    def __init__(self, ranks: int = 1, seconds: float = PATIENCE, **options: Any) -> None:
        self.key, self.epoch, self.ranks = new_key(), 1, ranks
        allowed = options.pop("allowed_addresses", ["127.0.0.1"])
        options = {"limits": PATIENT, "identity": IDENTITY} | options
        check = options.pop("check", None)
        self.listener = Listener(self.key, self.epoch, ranks, allowed_addresses=allowed, **options)
        self.address = self.listener.addresses[0]
        self._threads = ThreadPoolExecutor()
        self.accepted: Future[list[WorkerLink]] = self._threads.submit(
            self.listener.accept, time.monotonic() + seconds, check=check
        )
        self._joined: list[Future[WorkerLink]] = []

    def join(self, rank: int = 0, **changes: Any) -> Future[WorkerLink]:
        """Join on another thread."""
        asked = {"key": self.key, "epoch": self.epoch, "identity": IDENTITY, "limits": PATIENT} | changes
        future = self._threads.submit(
            join_controller, [self.address], rank=rank, deadline=time.monotonic() + PATIENCE, **asked
        )
        self._joined.append(future)
        return future

    def links(self) -> list[WorkerLink]:
        return self.accepted.result(PATIENCE)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *error: object) -> None:
        self.listener.close()
        for future in [self.accepted, *self._joined]:
            if future.exception(PATIENCE) is None:
                found = future.result()
                for link in found if isinstance(found, list) else [found]:
                    link.close()
        self._threads.shutdown()


class EchoProcess:
    """A process with ECHO, and the controller's link to it."""

    def __init__(self, limits: LinkLimits, silence_of_worker: float = PATIENCE) -> None:
        with Group(limits=replace(limits, stall_seconds=PATIENCE)) as group:
            path = os.pathsep.join(place for place in sys.path if place)
            self.process = subprocess.Popen(
                [sys.executable, "-c", ECHO, str(group.address[1]), str(silence_of_worker)],
                env=os.environ | {"PYTHONPATH": path, "KEY": group.key.hex()},
                stderr=subprocess.DEVNULL,
            )
            (self.link,) = group.links()
            group.accepted = Future()
            group.accepted.set_result([])

    def __enter__(self) -> EchoProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.link.close()
        self.process.kill()
        self.process.wait()
