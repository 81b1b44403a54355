"""A group of workers that are none: the whole model in this process, behind the interface of `HostGroup`, and faults at
chosen calls. So the engine's side of hosts is tested without processes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from cortexmlx.core.config import EngineConfig
from cortexmlx.distributed.messages import RankInfo
from cortexmlx.errors import CortexError, EngineClosed, HostLost
from cortexmlx.execution.boundary import Runner
from cortexmlx.execution.execution_modes import choose_execution_mode
from cortexmlx.models import load_model
from cortexmlx.stats import HostStats
from support.patience import PATIENCE

CALLS = ("begin", "can_resize", "resize", "copy", "dispatch", "forward", "choose", "collect", "settle")
"""The calls of a runner that raise HostLost, as those of `RemoteRunner` do."""

ENDS = ("forget", "release", "trim", "close")
"""The calls that do nothing once the group is lost."""


class LosingRunner:
    """A runner whose group can be lost: before or in the middle of a call. Every call raises HostLost from then on."""

    def __init__(self, runner: Any, group: LocalGroup) -> None:
        self._runner = runner
        self._group = group

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._runner, name)
        if name in ENDS and self._group.lost is not None:
            return lambda: None
        if name not in CALLS:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._group.check()
            if self._group.fault is not None and self._group.fault(name):
                self._group.lose(f"worker 1 ended while it was told to {name}")
                self._group.check()
            return found(*args, **kwargs)

        return call


class LocalGroup:
    """The interface of `HostGroup`. `fault(call)` says whether the group is lost when a runner's method is called.
    `refusals` are raised by the next starts.
    """

    fault: Callable[[str], bool] | None = None

    def __init__(self, config: EngineConfig, loaded: Any, on_lost: Callable[[int, HostLost], None]) -> None:
        self._config = config
        self._on_lost = on_lost
        self.lost: HostLost | None = None
        self.epoch = 0
        self.closed = 0
        self.refusals: deque[CortexError] = deque()
        self.may_start = threading.Event()
        """Starts wait for it."""
        self.may_start.set()
        self.ended = False
        self.starts = 0
        """How often a start was asked for."""
        self.names = ("worker 1",)
        self.machines = ("here",)
        self.infos: tuple[RankInfo, ...] = ()

    def open(self) -> None:
        self.starts += 1
        assert self.may_start.wait(PATIENCE)
        if self.ended:
            raise EngineClosed("closed while it was started")
        if self.refusals:
            raise self.refusals.popleft()
        self.epoch += 1
        self.lost = None
        config = self._config
        if self.epoch == 1:  # later starts are on another thread, where mlx cannot be used
            self._loaded = load_model(config.model)
        self._mode = choose_execution_mode(self._loaded.model, config.kv_bits, config.kv_group_size)
        loaded = self._loaded
        info = RankInfo(
            groups=self._mode.groups,
            vocab_size=int(loaded.model.args.vocab_size),
            context_length=loaded.context_length,
            weight_bytes=loaded.weight_bytes,
            parameters=loaded.parameters,
            dtype=loaded.dtype,
            name=loaded.name,
            architecture=str(loaded.config["model_type"]),
            notes=("a note of the worker",),
            identity=loaded.identity,
            memory_bytes=1 << 33,
            backend="reference",
            whole_bytes=loaded.weight_bytes,
            whole_parameters=loaded.parameters,
        )
        self.infos = (info,)

    reopen = open

    def make_runners(self, parts: Sequence[Any]) -> Runner:
        config = self._config
        mode = self._mode
        assert parts == (mode.groups,)
        runner = mode.make_runner(config.block_size, self.infos[0].vocab_size, mode.choose_backend(config.attention))
        return LosingRunner(runner, self)  # type: ignore[return-value]

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost

    def lose(self, why: str, notice: bool = False) -> None:
        """Lose the group. With `notice`, the thread that watches it says so."""
        self.lost = HostLost(why, host="worker 1")
        if notice:
            self._on_lost(self.epoch, self.lost)

    def stats(self) -> tuple[HostStats, ...]:
        return (HostStats("worker 1", self.infos[0].weight_bytes, 0, 0),)

    def cancel_starts(self) -> None:
        self.ended = True
        self.may_start.set()

    def close(self) -> None:
        self.closed += 1

    def describe(self) -> str:
        return "reference in 1 worker"

    def notes(self) -> tuple[str, ...]:
        return ()

    def reconsider(self) -> None:
        pass
