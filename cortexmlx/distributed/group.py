"""HostGroup: the workers of an engine, with the parts of its model opened in them."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cortexmlx.core.config import EngineConfig
from cortexmlx.distributed.messages import COMPARE_EVERY, RankInfo, RankOptions
from cortexmlx.distributed.overdue import DEFAULT_HANG_LIMITS, HANG_FACTOR, HANG_SWITCH, HangLimits
from cortexmlx.distributed.remote_runner import RemoteRunner
from cortexmlx.distributed.spec import Hosts
from cortexmlx.distributed.worker_group import WorkerGroup
from cortexmlx.errors import CortexError, EngineClosed, HostLost, HostRefused, InvalidRequest
from cortexmlx.execution.boundary import Runner
from cortexmlx.kv.sizing import (
    PREFILL_BUDGET,
    ArenaDemand,
    arena_blocks,
    bytes_per_token,
    row_state_bytes,
    split_memory,
)
from cortexmlx.kv.spec import AttentionWindow, GroupCounts, LayerGroup, paged_groups
from cortexmlx.models import LoadedModel
from cortexmlx.models.load import LOADING_STEPS
from cortexmlx.stats import HostStats
from cortexmlx.types.progress import Progress

log = logging.getLogger("cortexmlx")

ATTEMPTS = 3
"""How often lost workers are started again before their loss is final."""

PAUSE_SECONDS = 1.0
"""Seconds between the first two attempts; twice as many before each further one."""

_LOOK_SECONDS = 0.1
"""How often a pause is interrupted to report, so that it notices when the engine is closed."""

OnLost = Callable[[int, HostLost], None]
"""Called with the epoch of the workers and the loss of one, on any thread."""


class HostGroup:
    """The workers of an engine, each with its part of the model. It also describes what computes attention in them
    (`AttentionInUse`). One thread at a time may use it: the engine's, or the one that starts lost workers.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel, on_lost: OnLost) -> None:
        """Nothing is started yet. `loaded` is the model without its weights. `on_lost` is called when a worker is lost,
        even if nobody waits for it. Raises HostRefused for wrong `config.hosts`, and InvalidRequest for wrong limits in
        the environment.
        """
        self._config = config
        self._loaded = loaded
        self._on_lost = on_lost
        self._options = rank_options(config, loaded.name, loaded.adapter)
        self._limits = read_hang_limits()
        self._workers = WorkerGroup(Hosts.parse(str(config.hosts)), check=self._report_once)
        self._runner: RemoteRunner | None = None
        self._starts_cancelled = False
        self.infos: tuple[RankInfo, ...] = ()
        """What each worker tells about its part."""
        self.machines: tuple[str, ...] = tuple(host.ssh for host in self._workers.hosts.hosts)
        """The machine of each worker."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the workers for people, by rank."""
        return self._workers.names

    @property
    def epoch(self) -> int:
        """The number of the last start, from 1."""
        return self._workers.epoch

    def open(self) -> None:
        """Start the workers; each opens its part of the model. Raises HostLost, HostRefused and what opening raises."""
        try:
            with self._report_progress():
                self._workers.reopen()
                epoch = self.epoch
                self._workers.when_lost(lambda lost: self._on_lost(epoch, lost))
                self._runner = RemoteRunner(self._workers.channels, self.names, self._limits)
                self.infos = self._runner.open(self._options)
            for name, info in zip(self.names, self.infos, strict=True):
                if info.identity != self._loaded.identity:
                    raise HostRefused(
                        f"{name} has other files of {self._loaded.name} than this machine: copy the model's folder to "
                        "every host, the same version"
                    )
        except BaseException:
            self._workers.close()
            raise

    def reopen(self) -> None:
        """End and restart all workers in up to three attempts. Raises the last HostLost; other errors at once."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self.open()
            except HostLost as lost:
                log.warning("attempt %d of %d to start the workers again failed: %s", attempt, ATTEMPTS, lost)
                if attempt == ATTEMPTS:
                    raise
                self._sleep(PAUSE_SECONDS * 2 ** (attempt - 1))

    def make_runners(self, parts: Sequence[Part]) -> Runner:
        """Have each worker make the runner of its layers. Return the runner of all workers together."""
        runner = self._opened_runner
        with self._report_progress():  # a worker computes a token: it reads its weights
            runner.make_runners(parts)
        return runner

    def stats(self) -> tuple[HostStats, ...]:
        """Return each worker's statistics, as of its newest answer; an empty tuple while there are no workers."""
        rank_memory = [state.bytes for state in self._opened_runner.ranks]
        if len(rank_memory) < len(self.names):
            return ()
        return tuple(
            HostStats(name, info.weight_bytes, bytes_.arena, bytes_.active)
            for name, info, bytes_ in zip(self.names, self.infos, rank_memory, strict=True)
        )

    def cancel_starts(self) -> None:
        """Make a start that is under way, and every later one, raise EngineClosed soon. Any thread may call it."""
        self._starts_cancelled = True

    def close(self) -> None:
        """End all workers. Safe to call again."""
        if self._runner is not None:
            self._runner.close()
        self._workers.close()

    # -- `AttentionInUse` ---------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """Return a line that says what computes attention in the workers."""
        return f"{', '.join(dict.fromkeys(info.backend for info in self.infos))} in {len(self.infos)} workers"

    def notes(self) -> tuple[str, ...]:
        """Return an empty tuple: notes on attention are in the workers' own logs."""
        return ()

    def reconsider(self) -> None:
        """Do nothing: a worker reconsiders its kernels by itself when its runner forgets a step."""

    # -- opening ------------------------------------------------------------------------------------------------------

    @property
    def _opened_runner(self) -> RemoteRunner:
        """The runner of all workers, once they are started."""
        assert self._runner is not None, "the group was not opened"
        return self._runner

    @contextmanager
    def _report_progress(self) -> Iterator[None]:
        """Report progress on a thread while the body waits for workers. If the engine is closed meanwhile, end
        the workers, which also ends the wait, and raise EngineClosed.
        """
        report_errors: list[BaseException] = []
        stop_event = threading.Event()

        def report_until_stopped() -> None:
            try:
                while not stop_event.wait(_LOOK_SECONDS):
                    self._report_once()
            except BaseException as error:
                report_errors.append(error)
                self._workers.close()

        reporter = threading.Thread(target=report_until_stopped, name="cortexmlx opens workers", daemon=True)
        reporter.start()
        try:
            yield
        except CortexError as error:
            stop_event.set()
            reporter.join()
            if report_errors:
                raise report_errors[0] from error
            raise
        finally:
            stop_event.set()
            reporter.join()

    def _report_once(self) -> None:
        """Report that the model is loading. Raises EngineClosed if the engine was closed."""
        if self._starts_cancelled:
            raise EngineClosed("the engine was closed while its workers were started")
        if self._config.on_progress is not None:
            self._config.on_progress(Progress("loading", 0, LOADING_STEPS))

    def _sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, and report progress meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._report_once()
            time.sleep(_LOOK_SECONDS)


def rank_options(config: EngineConfig, name: str, adapter: str | Path | None) -> RankOptions:
    """Return what a worker needs to open its part of the model `name`."""
    return RankOptions(
        model=_name_on_all_hosts(name),
        adapter=None if adapter is None else str(adapter),
        dequantize=config.dequantize,
        kv_bits=config.kv_bits,
        kv_group_size=config.kv_group_size,
        block_size=config.block_size,
        attention=config.attention,
        reproducible=config.reproducible,
        max_rows=config.max_rows,
        prefill_budget=config.prefill_budget or PREFILL_BUDGET,
        compare_every=read_compare_interval(),
    )


def _name_on_all_hosts(name: str) -> str:
    """Return the name by which every worker finds a model: an absolute path, or a name that is no path."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


# What the environment sets about hosts: when a worker hangs, and how often plans are compared.


COMPARE_SWITCH = "CORTEXMLX_COMPARE_EVERY"
"""The environment variable that says after how many steps the workers' plans are compared: 1 in debug runs."""


def read_hang_limits() -> HangLimits:
    """Read from the environment how long a worker may take before it counts as hung. Raises InvalidRequest."""
    text = os.environ.get(HANG_SWITCH)
    if text is None:
        return DEFAULT_HANG_LIMITS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (math.isfinite(seconds) and seconds >= 0):
        raise InvalidRequest(f"{HANG_SWITCH}={text}: give a number of seconds, or 0 for no limit")
    return HangLimits(seconds, max(DEFAULT_HANG_LIMITS.first_seconds, HANG_FACTOR * seconds))


def read_compare_interval() -> int:
    """Read from the environment after how many steps plans are compared. Raises InvalidRequest."""
    text = os.environ.get(COMPARE_SWITCH)
    if text is None:
        return COMPARE_EVERY
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0):
        raise InvalidRequest(f"{COMPARE_SWITCH}={text}: give a number of steps, 1 or more")
    return int(text[:9])


# What the parts of a model, on the ranks of a group, are together: layer groups, blocks and snapshots.


Part = tuple[LayerGroup, ...]
"""The layer groups of one rank."""


def align_groups(parts: Iterable[Sequence[LayerGroup]]) -> tuple[Part, ...]:
    """Return each rank's layer groups, in one order for all ranks. A group is empty on a rank without its layers."""
    parts = [tuple(part) for part in parts]
    specs = list(dict.fromkeys(group.spec for part in parts for group in part))
    layers = [{group.spec: group.layers for group in part} for part in parts]
    return tuple(tuple(LayerGroup(spec, rank_layers.get(spec, ())) for spec in specs) for rank_layers in layers)


def join_groups(parts: Sequence[Part]) -> Part:
    """Return the whole model's layer groups, joined from all ranks' `parts`, which `align_groups` has put in order."""
    return tuple(
        LayerGroup(rank_groups[0].spec, tuple(layer for group in rank_groups for layer in group.layers))
        for rank_groups in zip(*parts, strict=True)
    )


@dataclass(frozen=True)
class GroupCapacity:
    """The blocks and snapshots that fit on every rank of a group."""

    blocks: GroupCounts
    """How many blocks each group may have, by the rank that has the least room for them."""
    snapshots: int | None
    """How many snapshots of a row's state; None if the model has no states."""


def common_capacity(parts: Sequence[Part], memory: Sequence[int], load: ArenaDemand, context: int) -> GroupCapacity:
    """Return the blocks and snapshots that fit on every rank of a group. Rank `r` has `memory[r]` bytes, and rows have
    at most `context` tokens. `parts` are in one order. Raises InvalidRequest if no block fits on some rank.

    All ranks have the same block tables. So the smallest number of blocks counts, and groups that see equally far have
    equally many (`BlockPools`), also if they are on different ranks.
    """
    groups = paged_groups(join_groups(parts))
    states = [split_memory(part, bytes_, load.rows) for part, bytes_ in zip(parts, memory, strict=True)]
    snapshots = [count for part, (_, count) in zip(parts, states, strict=True) if row_state_bytes(part)]
    max_blocks: dict[AttentionWindow, int] = {}
    for part, (bytes_, _) in zip(parts, states, strict=True):
        block_groups = [group for group in part if bytes_per_token([group])]
        for group, count in zip(
            block_groups, arena_blocks(bytes_, block_groups, load) if block_groups else (), strict=True
        ):
            window = group.spec.attention_window
            max_blocks[window] = min(count, max_blocks.get(window, count))
    context_blocks = load.rows * -(-context // load.block_size)
    blocks = tuple(max_blocks.get(group.spec.attention_window, context_blocks) for group in groups)
    return GroupCapacity(blocks, min(snapshots) if snapshots else None)
