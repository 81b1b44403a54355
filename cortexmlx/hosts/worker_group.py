"""WorkerGroup: starts one worker per rank, connects to all of them, and ends them. Without mlx.

Each start is an epoch, with a key of its own. A worker of an earlier epoch that wakes up knows neither.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from cortexmlx.errors import CortexError, HostLost, HostRefused
from cortexmlx.hosts.channel import Message
from cortexmlx.hosts.handshake import new_key
from cortexmlx.hosts.launch.addresses import addresses
from cortexmlx.hosts.launch.assignment import READY, Assignment
from cortexmlx.hosts.launch.processes import Processes
from cortexmlx.hosts.launch.versions import versions
from cortexmlx.hosts.link import Link
from cortexmlx.hosts.listener import Listener
from cortexmlx.hosts.spec import Hosts

log = logging.getLogger("cortexmlx")

WORKER = (sys.executable, "-P", "-m", "cortexmlx.hosts.worker")
"""The command line of a worker. It is the same on every host: so are the paths of Python and of the model."""

START_SECONDS = 90.0

_NOTICE_SECONDS = 1.5
"""How long to wait for the launcher to tell how a lost worker ended."""
_SHOWN_LINES = 3


class WorkerGroup:
    """The workers of one engine, and a channel to each. `reopen` starts them anew after one was lost."""

    def __init__(
        self,
        hosts: Hosts,
        identity: Mapping[str, str] | None = None,
        *,
        seconds: float = START_SECONDS,
        worker: Sequence[str] = WORKER,
    ) -> None:
        """Prepare a group; `reopen` starts it. `identity` is what must be equal on all hosts, by default the versions.
        `seconds`: how long a start may take. `worker`: the command line of a worker.
        """
        self.hosts = hosts
        self.names = tuple(f"{name}, rank {rank}" for rank, name in enumerate(hosts.names))
        """The workers by rank, as a user would name them."""
        self.epoch = 0
        """The number of the last start, from 1."""
        self.channels: tuple[_WatchedChannel, ...] = ()
        """One channel to each worker, by rank. Each error of theirs has the last lines that the workers wrote."""
        self._identity = dict(versions() if identity is None else identity)
        self._seconds = seconds
        self._worker = list(worker)
        self._processes: Processes | None = None

    @classmethod
    def open(
        cls,
        hosts: Hosts,
        identity: Mapping[str, str] | None = None,
        *,
        seconds: float = START_SECONDS,
        worker: Sequence[str] = WORKER,
    ) -> WorkerGroup:
        """Start a group. Arguments as for the constructor; errors as of `reopen`."""
        group = cls(hosts, identity, seconds=seconds, worker=worker)
        group.reopen()
        return group

    def reopen(self) -> None:
        """End the workers, if there are any, and start new ones: another epoch. `channels` are new. After an error
        nothing runs, and it may be called again.

        Raises HostRefused if the hosts do not fit together, HostLost if a worker ended or did not come in time.
        """
        self.close()
        self.epoch += 1
        deadline = time.monotonic() + self._seconds
        key = new_key()
        places = addresses(self.hosts)
        listener = Listener(
            key, self.epoch, self.hosts.ranks, self._identity, places.workers, names=self.hosts.names, bind=places.own
        )
        try:
            where = tuple((host, port) for host, port in listener.addresses)
            task = Assignment(where, self.epoch, self.hosts.ranks, self.hosts.backend, self._seconds)
            self._processes = Processes(self.hosts, [task.variable()], key, self._worker)
            links = listener.accept(deadline, check=self._check_started)
            self.channels = tuple(_WatchedChannel(link, self) for link in links)
            for channel in self.channels:
                self._meet(channel, deadline)
        except BaseException as error:
            said = self._lines() if isinstance(error, CortexError) else ""
            self.close()
            if isinstance(error, HostLost) and said and said not in str(error):
                raise HostLost(f"{error}{said}", host=error.host) from error
            raise
        finally:
            listener.close()
        log.info("%d workers run, by %s: %s", len(self.names), self.hosts.backend, "; ".join(self.names))

    def when_lost(self, action: Callable[[HostLost], None]) -> None:
        """Call `action` when a worker of this epoch is lost, even if nobody sends or receives: on another thread, and
        perhaps once for each worker.
        """
        for channel in self.channels:
            channel.when_lost(action)

    def why(self, lost: HostLost) -> HostLost:
        """Return an error of a link with what is known of its worker: how it ended, and the last lines of output."""
        if self._processes is None:
            return lost
        self._processes.wait(_NOTICE_SECONDS)
        ended = self._processes.ended_ranks()
        how = "; ".join(f"{self.names[rank]} ended: {how}" for rank, how in ended.items() if rank < len(self.names))
        host = self.names[next(iter(ended))] if ended and max(ended) < len(self.names) else lost.host
        return HostLost(f"{lost}{f' ({how})' if how else ''}{self._lines()}", host=host)

    def close(self) -> None:
        """End all workers. Nothing is left: no process, no port, no temporary file. Safe to call again."""
        for channel in self.channels:
            channel.close()
        self.channels = ()
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_started(self) -> None:
        """Raise HostLost if a worker has ended while others are awaited."""
        if self._processes is not None and (self._processes.ended or self._processes.ended_ranks()):
            raise self.why(HostLost("the workers ended before all had connected"))

    def _meet(self, channel: _WatchedChannel, deadline: float) -> None:
        """Wait for a worker to meet the other ranks."""
        if channel.receive(max(0.1, deadline - time.monotonic())) != READY:
            raise HostRefused(f"{channel.name} runs something else than a worker of this version")

    def _lines(self) -> str:
        lines = [] if self._processes is None else self._processes.last_lines[-_SHOWN_LINES:]
        return f". Its last lines: {' | '.join(lines)}" if lines else ""


class _WatchedChannel:
    """A link whose errors say how the worker ended."""

    def __init__(self, link: Link, group: WorkerGroup) -> None:
        self.name = link.name
        self._link = link
        self._group = group

    def send(self, message: Message) -> None:
        try:
            self._link.send(message)
        except HostLost as lost:
            raise self._group.why(lost) from lost

    def receive(self, timeout: float | None = None) -> bytes:
        try:
            return self._link.receive(timeout)
        except HostLost as lost:
            raise self._group.why(lost) from lost

    def when_lost(self, action: Callable[[HostLost], None]) -> None:
        self._link.when_lost(lambda lost: action(self._group.why(lost)))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._link.close()
