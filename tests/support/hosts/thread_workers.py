"""Workers that are threads of this process, each with the whole model, behind the interface of `WorkerGroup`. Engines
with hosts and a disk tier are tested with them, without processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.core.threads import Task
from cortexmlx.distributed.disk.rank_store import RankStore, Tell
from cortexmlx.distributed.options import RankOptions
from cortexmlx.distributed.spec import Hosts
from cortexmlx.errors import HostLost
from cortexmlx.stats import StoreState
from support.hosts.channels import QueueChannel, channel_pair
from support.hosts.whole_ranks import WholeModel, served
from support.patience import PATIENCE
from support.store.stored import Stored


class _Rank(WholeModel):
    """A rank with a folder of its own, as if it were another machine."""

    def __init__(self, options: RankOptions, rank: int, stores: dict[int, RankStore]) -> None:
        own = None if options.kv_store is None else f"{options.kv_store}/{rank}"
        super().__init__(replace(options, kv_store=own), rank)
        self._stores = stores

    def open_store(self, runner: Any, tell: Tell) -> RankStore | None:
        """As `OpenedRank.open_store`."""
        store = super().open_store(runner, tell)
        if store is not None:
            self._stores[self._rank] = store
        return store


class ThreadWorkers:
    """The interface of `WorkerGroup`. `stores` has the newest store of each rank."""

    def __init__(self, hosts: Hosts, check: Callable[[], None] = lambda: None) -> None:
        self.hosts = hosts
        self.names = tuple(f"rank {rank}" for rank in range(hosts.ranks))
        self.epoch = 0
        self.channels: tuple[QueueChannel, ...] = ()
        self.stores: dict[int, RankStore] = {}
        self._tasks: list[Task] = []
        self._actions: list[Callable[[HostLost], None]] = []

    def reopen(self) -> None:
        """Start the ranks anew."""
        self.close()
        self.epoch += 1
        pairs = [channel_pair(name) for name in self.names]
        self.channels = tuple(ours for ours, _ in pairs)
        for rank, (_, theirs) in enumerate(pairs):
            task = Task(lambda raised, rank=rank, theirs=theirs: served(theirs, lambda o: _Rank(o, rank, self.stores)))
            task.start()
            self._tasks.append(task)

    def when_lost(self, action: Callable[[HostLost], None]) -> None:
        """As `WorkerGroup.when_lost`."""
        self._actions.append(action)

    def lose(self, rank: int) -> None:
        """End the connection to a rank."""
        self.channels[rank].close()

    def close(self) -> None:
        """End all ranks, and wait until they have."""
        for channel in self.channels:
            channel.close()
        for task in self._tasks:
            task.join()
        self.channels, self._tasks, self._actions = (), [], []


@contextmanager
def thread_workers() -> Iterator[list[ThreadWorkers]]:
    """Engines with hosts that are made in this context have workers in this process. The list has those of each."""
    made: list[ThreadWorkers] = []

    def make(*args: Any, **kwargs: Any) -> ThreadWorkers:
        made.append(ThreadWorkers(*args, **kwargs))
        return made[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("cortexmlx.distributed.group.WorkerGroup", make)
        yield made


class HostedStore(Stored):
    """A driver whose core has workers, which have a store."""

    def __init__(self, model: Path, folder: Path, hosts: int | str = 2, **config: Any) -> None:
        super().__init__(model, folder, hosts=hosts, **config)

    def hear(self) -> None:
        """Carry out what threads have asked for so far."""
        while not self.calls.empty():
            self.calls.get()(self.core)

    def hear_until(self, happened: Callable[[], bool]) -> None:
        """Carry out what threads ask for until something has happened."""
        while not happened():
            self.calls.get(timeout=PATIENCE)(self.core)

    def join(self) -> HostedStore:
        """Wait until the weights are hashed on all ranks."""
        while self.core.disk is not None and self.core.disk.state is StoreState.HASHING:
            self.calls.get(timeout=PATIENCE)(self.core)
        self.hear()
        return self

    def ask(self, prompt: Any, tokens: int = 10, **params: Any) -> tuple[list[int], int]:
        """The answer, and how much of the prompt was not computed."""
        self.hear()
        return super().ask(prompt, tokens, **params)

    def rest(self) -> None:
        """What an idle engine does, until all that is cached is stored."""
        self.hear()
        super().rest()
        self.hear()
