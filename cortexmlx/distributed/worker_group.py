"""WorkerGroup: starts one worker per rank, connects to all of them, and ends them. Without mlx.

Each start is an epoch, with a key of its own. A worker of an earlier epoch that wakes up knows neither.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from cortexmlx.distributed.channel import Message
from cortexmlx.distributed.launch.assignment import MEET, READY, WorkerAssignment, package_versions
from cortexmlx.distributed.launch.processes import WorkerProcesses, find_addresses
from cortexmlx.distributed.links.handshake import new_key
from cortexmlx.distributed.links.link import DEFAULT_LIMITS, WorkerLink
from cortexmlx.distributed.links.listener import Listener
from cortexmlx.distributed.spec import Hosts
from cortexmlx.errors import HostLost, HostRefused

log = logging.getLogger("cortexmlx")

WORKER = (sys.executable, "-P", "-m", "cortexmlx.distributed.worker")
"""The command line of a worker. It is the same on every host: so are the paths of Python and of the model."""

START_SECONDS = 120.0

HEAD_START_SECONDS = 0.05
"""In MLX's ring the last rank connects first. It waits a second if the others do not listen yet."""

_SHOWN_LINES = 3


class WorkerGroup:
    """The workers of one engine, and a channel to each. If one is lost, all links end; `reopen` starts all again."""

    def __init__(
        self,
        hosts: Hosts,
        identity: Mapping[str, str] | None = None,
        *,
        seconds: float = START_SECONDS,
        worker: Sequence[str] = WORKER,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Prepare a group; `reopen` starts it. `identity` is what must be equal on all hosts, by default the versions.
        `seconds`: how long a start may take. `worker`: the command line of a worker. `check` is called several times a
        second while workers are awaited, and may raise to end the wait.
        """
        self.hosts = hosts
        self.names = tuple(f"{name}, rank {rank}" for rank, name in enumerate(hosts.names))
        """The workers by rank, as a user would name them."""
        self.epoch = 0
        """The number of the last start, from 1."""
        self.channels: tuple[WorkerChannel, ...] = ()
        """One channel to each worker, by rank. Each error of theirs has the last lines that the workers wrote."""
        self._identity = dict(package_versions() if identity is None else identity)
        self._seconds = seconds
        self._worker = list(worker)
        self._check = check or (lambda: None)
        self._processes: WorkerProcesses | None = None

    @classmethod
    def open(
        cls,
        hosts: Hosts,
        identity: Mapping[str, str] | None = None,
        *,
        seconds: float = START_SECONDS,
        worker: Sequence[str] = WORKER,
        check: Callable[[], None] | None = None,
    ) -> WorkerGroup:
        """Make a group and start its workers. Arguments and errors are those of the constructor and `reopen`."""
        group = cls(hosts, identity, seconds=seconds, worker=worker, check=check)
        group.reopen()
        return group

    def reopen(self) -> None:
        """End the workers, if there are any, and start new ones as another epoch. `channels` are new. After an error
        nothing runs, and it may be called again.

        Raises HostRefused if the hosts do not fit together, HostLost if a worker ended or did not come in time.
        """
        self.close()
        self.epoch += 1
        deadline = time.monotonic() + self._seconds
        key = new_key()
        addresses = find_addresses(self.hosts)
        listener = Listener(
            key,
            self.epoch,
            self.hosts.ranks,
            self._identity,
            addresses.workers,
            names=self.names,
            bind=addresses.controller,
        )
        try:
            listener_addresses = tuple((host, port) for host, port in listener.addresses)
            task = WorkerAssignment(listener_addresses, self.epoch, self.hosts.ranks, self.hosts.backend, self._seconds)
            processes = self._processes = WorkerProcesses(self.hosts, [task.environment_entry()], key, self._worker)
            links = listener.accept(deadline, check=self._check_still_running)
            self.channels = tuple(WorkerChannel(rank, links, processes, self.names) for rank in range(len(links)))
            self._form_mlx_group(deadline)
        except BaseException as error:
            last_lines = (
                _quote_last_lines(self._processes)
                if isinstance(error, HostLost) and self._processes is not None
                else ""
            )
            self.close()
            if last_lines and isinstance(error, HostLost) and last_lines not in str(error):
                raise HostLost(f"{error}{last_lines}", host=error.host) from error
            raise
        finally:
            listener.close()
        log.info("%d workers run, by %s: %s", len(self.names), self.hosts.backend, "; ".join(self.names))

    def when_lost(self, action: Callable[[HostLost], None]) -> None:
        """Have `action` called when a worker of this epoch is lost, even if nobody sends or receives. It runs on
        another thread, and perhaps once for each worker.
        """
        for channel in self.channels:
            channel.when_lost(action)

    def close(self) -> None:
        """End all workers, and leave no process, port or temporary file. Safe to call again."""
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

    def _check_still_running(self) -> None:
        """Raise HostLost if a worker has ended while others are awaited."""
        self._check()
        if self._processes is not None and (self._processes.has_ended or self._processes.failed_ranks()):
            raise explain_loss(HostLost("the workers ended before all had connected"), self._processes, self.names)

    def _form_mlx_group(self, deadline: float) -> None:
        """Have the workers, which have all joined, form MLX's group. Raises HostRefused."""
        *others, last = self.channels
        for channel in others:
            channel.send(MEET)
        time.sleep(HEAD_START_SECONDS if others else 0.0)
        last.send(MEET)
        for channel in self.channels:
            if channel.receive(max(0.1, deadline - time.monotonic())) != READY:
                raise HostRefused(f"{channel.name} runs something else than a worker of this version")


class WorkerChannel:
    """A channel to a worker. Its errors say how the worker ended, and the last lines that the worker wrote."""

    def __init__(
        self, rank: int, links: Sequence[WorkerLink], processes: WorkerProcesses, names: Sequence[str]
    ) -> None:
        """`links` are those of all ranks: the side that ended a link tells why a worker was lost."""
        self._link = links[rank]
        self.name = self._link.name
        self._links = links
        self._processes = processes
        self._names = names

    @property
    def loss_reason(self) -> str | None:
        """Why the connection is lost; None if it is not."""
        return self._link.loss_reason

    @property
    def processor_seconds(self) -> float | None:
        """CPU seconds of the worker's process, as of its newest heartbeat; None if unknown."""
        return self._link.processor_seconds

    @property
    def silent_seconds(self) -> float:
        """Seconds since the other side's newest heartbeat arrived."""
        return self._link.silent_seconds

    def send(self, message: Message) -> None:
        """Do what `Channel.send` says. A HostLost also says how the worker ended."""
        try:
            self._link.send(message)
        except HostLost as lost:
            raise self._explain(lost) from lost

    def receive(self, timeout: float | None = None) -> bytes:
        """Do what `Channel.receive` says. A HostLost also says how the worker ended."""
        try:
            return self._link.receive(timeout)
        except HostLost as lost:
            raise self._explain(lost) from lost

    def when_lost(self, action: Callable[[HostLost], None]) -> None:
        """Do what `WorkerLink.when_lost` says."""
        self._link.when_lost(lambda lost: action(self._explain(lost)))

    def close(self) -> None:
        """Do what `Channel.close` says."""
        self._link.close()

    def _explain(self, error: HostLost) -> HostLost:
        """Return the error with more in its message: which worker ended first, and how."""
        return explain_loss(error, self._processes, self._names, lambda rank: self._links[rank].ended_there)


def explain_loss(
    error: HostLost,
    processes: WorkerProcesses,
    names: Sequence[str],
    ended_by_worker: Callable[[int], bool] = lambda rank: True,
) -> HostLost:
    """Return a HostLost that also says which worker ended first, how, and the last lines of output. `ended_by_worker`
    returns whether it was the worker of a rank that ended its link, not this process.

    It is the worker of the link that ended first, if it ended by itself; else the first that the launcher reports to
    have done so (it looks ten times a second); else that of the link, without a reason.
    """
    processes.await_launcher_exit()
    exit_reasons = {names[rank]: reason for rank, reason in processes.failed_ranks().items() if rank < len(names)}
    message = None if exit_reasons else _external_cause(processes, len(names), ended_by_worker)
    if message is not None:
        return HostLost(message)
    host = error.host if error.host in exit_reasons else next(iter(exit_reasons), error.host)
    if host is None or host not in exit_reasons:
        message = str(error)
    elif error.host is None:
        message = f"{error} ({host}: {exit_reasons[host]})"
    else:
        message = f"{error if host == error.host else f'{host} ended'} ({exit_reasons[host]})"
    return HostLost(message + _quote_last_lines(processes), host=host)


def _external_cause(processes: WorkerProcesses, num_ranks: int, ended_by_worker: Callable[[int], bool]) -> str | None:
    """Return why workers ended although none failed; None if unknown. `ended_by_worker`: if a rank ended its link."""
    if processes.launcher_signal is not None:
        return f"the launcher of the workers on this machine was ended (signal {processes.launcher_signal})"
    if processes.launcher_failure is not None:
        return f"the launcher of the workers on this machine failed: {processes.launcher_failure}"
    if any(rank < num_ranks and ended_by_worker(rank) for rank in processes.orphaned_ranks()):
        return (
            f"the workers heard nothing of this process for {DEFAULT_LIMITS.silence_seconds:g} s: "
            "it was stopped, or the network was cut"
        )
    return None


def _quote_last_lines(processes: WorkerProcesses) -> str:
    """Return the last lines of the workers' output as the end of an error message; empty if there are none."""
    lines = processes.last_lines[-_SHOWN_LINES:]
    return f". The workers' last lines: {' | '.join(lines)}" if lines else ""
