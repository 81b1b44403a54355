"""HostedModel: a model whose parts are in workers, in other processes or on other machines."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cortexmlx.core.config import EngineConfig
from cortexmlx.core.embedding_support import no_support
from cortexmlx.core.engine_model import (
    AttentionInUse,
    Call,
    EngineModel,
    check_prefix_cache,
    model_info,
    scheduler_config,
)
from cortexmlx.disk.connector import StoreConnector
from cortexmlx.distributed.group import HostGroup, Part, align_groups, common_capacity, join_groups
from cortexmlx.errors import AdapterRefused, HostLost, HostRefused
from cortexmlx.execution.boundary import AdapterSet, Runner
from cortexmlx.execution.execution_modes import begin_paged_arena
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.kv.sizing import (
    ArenaDemand,
    bytes_per_token,
    check_kv_memory,
    default_kv_bytes,
    kv_memory_warning,
    max_long_tail_rows,
    reserved_bytes,
)
from cortexmlx.kv.spec import GroupCounts
from cortexmlx.models import LoadedModel
from cortexmlx.models.load import load_without_weights
from cortexmlx.scheduling.scheduler import Scheduler
from cortexmlx.speculation.drafter import HeadDrafter
from cortexmlx.stats import HostStats, ModelInfo, TimedChoice
from cortexmlx.types.images import ImageWriter
from cortexmlx.vision.sight import Sight

NOT_STORED = "nothing goes to the KV store: with hosts, prompts are computed anew after a restart"


class HostedModel:
    """A model that a group of workers serves. No weights, keys or values are in this process. See `EngineModel`."""

    draft: EngineModel | None = None
    sight: Sight | None = None
    images: ImageWriter | None = None
    disk: StoreConnector | None = None
    choices: tuple[TimedChoice, ...] = ()
    embedding = no_support(
        "with hosts no texts are embedded and no documents judged: the model's states are in other processes. Open the "
        "model without hosts"
    )

    def __init__(self, config: EngineConfig, wake: Callable[[Call], None]) -> None:
        """`wake(call)` has `call` carried out between two steps. Threads that watch the workers use it. Raises what
        `Engine` raises, HostRefused and HostLost.
        """
        self._config = config
        self._start_lock = threading.Lock()
        self.runner: Runner
        loaded = load_without_weights(config.model, adapter=config.adapter, on_progress=config.on_progress)
        self._group = HostGroup(
            config, loaded, lambda epoch, lost: wake(lambda core: self._recover_from_loss(core, epoch, lost))
        )
        try:
            self._group.open()
            self._groups = [info.groups for info in self._group.infos]
            self._parts, self.runner = self._make_runners()
            self.loaded = self._describe_whole(loaded)
            self.info = self._divide_memory()
        except BaseException:
            self.release()
            raise

    def _recover_from_loss(self, core: Any, epoch: int, loss: HostLost) -> None:
        """Recover from a loss that was noticed outside of a step, unless a step or a start has met the loss since."""
        if core.recovery.open and epoch == self._group.epoch:
            core.recovery.recover(loss)

    def _make_runners(self) -> tuple[tuple[Part, ...], Runner]:
        """Have the workers make their runners. Return each worker's layer groups and the runner of all."""
        parts = align_groups(info.groups for info in self._group.infos)
        return parts, self._group.make_runners(parts)

    def _describe_whole(self, files: LoadedModel) -> LoadedModel:
        """Return the description of the whole model, with its sizes and the notes of all workers."""
        infos = self._group.infos
        return replace(
            files,
            weight_bytes=infos[0].whole_bytes,
            parameters=infos[0].whole_parameters,
            dtype=infos[0].dtype,
            notes=tuple(dict.fromkeys((*files.notes, *(note for info in infos for note in info.notes)))),
        )

    def _divide_memory(self) -> ModelInfo:
        """Divide each worker's memory into weights, KV arena and reserve. Return the model's public description."""
        config, infos, parts = self._config, self._group.infos, self._parts
        self._sizes = load = ArenaDemand.from_options(config.max_rows, config.prefill_budget, config.block_size)
        context, vocab_size = self.loaded.context_length, infos[0].vocab_size
        max_row_tokens = context if config.keep is None else min(context, config.keep.max_row_tokens)
        on_gpus = all(info.backend == "metal" for info in infos)
        tail_rows = (
            [max_long_tail_rows(p, i.weight_bytes) for p, i in zip(parts, infos, strict=True)] if on_gpus else [0]
        )
        self._long_tail_rows = min(tail_rows)
        workers_per_machine = Counter(self._group.machines)
        memory: list[int] = []
        memory_warnings: tuple[str, ...] = ()
        for part, info, machine in zip(parts, infos, self._group.machines, strict=True):
            available = info.memory_bytes // workers_per_machine[machine]
            reserved_memory = reserved_bytes(part, load.rows, vocab_size, info.weight_bytes, self._long_tail_rows)
            if config.kv_bytes is not None:
                check_kv_memory(
                    config.kv_bytes * workers_per_machine[machine], info.memory_bytes, info.memory_bytes, machine
                )
                memory_warnings += kv_memory_warning(config.kv_bytes, max(available - reserved_memory, 0), machine)
            memory.append(config.kv_bytes or default_kv_bytes(part, load, max_row_tokens, available, reserved_memory))
        self._capacity = common_capacity(parts, memory, load, max_row_tokens)
        self.blocks = self._capacity.blocks
        model_groups = join_groups(parts)
        workers = f"{len(infos)} workers: {'; '.join(self._group.names)}"
        store_notes = () if config.kv_store is None else (NOT_STORED,)
        notes = (*self.loaded.notes, *dict.fromkeys(memory_warnings), *store_notes, workers)
        return model_info(self.loaded, vocab_size, bytes_per_token(model_groups), notes)

    @property
    def hosts(self) -> tuple[HostStats, ...]:
        """The statistics of each worker."""
        return self._group.stats()

    @property
    def backend(self) -> AttentionInUse:
        """The description of what computes attention in the workers."""
        return self._group

    def make_cache(self, blocks: GroupCounts, from_scratch: bool = False) -> KVCache:
        """Make an empty arena per worker. Return the cache. Raises HostLost; MemoryRefused unless `from_scratch`."""
        prefix = PrefixCache(self._config.block_size)
        parts, snapshots = join_groups(self._parts), self._capacity.snapshots
        return begin_paged_arena(
            self.runner, parts, blocks, prefix, snapshots, lambda b: self.may_resize(b), from_scratch
        )

    def may_resize(self, blocks: GroupCounts) -> bool:
        """Return whether all workers could get `blocks` blocks. True if a worker is lost: the next step raises that."""
        try:
            return self.runner.can_resize(blocks)
        except HostLost:
            return True

    def make_scheduler(self, cache: KVCache) -> Scheduler:
        """Return a new scheduler without requests."""
        settings = scheduler_config(self._config, self._sizes, self.loaded.context_length, self.info.vocab_size)
        return Scheduler(cache, replace(settings, long_tail_rows=self._long_tail_rows))

    def start_store(self) -> None:
        """Do nothing: a model of workers has no KV store on disk."""

    def make_head_drafter(self, scheduler: Scheduler) -> HeadDrafter | None:
        """Return None: the workers have no draft head."""
        return None

    def restart_workers(self) -> None:
        """Start all workers again as a new epoch, after one was lost or a message may have been cut in the middle.
        Raises HostLost if that fails again and again, and HostRefused if the hosts have another model now.

        It takes long, and needs no mlx. So any thread may call it, while the engine's thread may `release` the model.
        """
        with self._start_lock:
            self._group.reopen()
            if [info.groups for info in self._group.infos] != self._groups:
                self._group.close()
                raise HostRefused("the hosts have another model now than before they were lost: make a new engine")
            _, self._reopened_runner = self._make_runners()

    def reset(self) -> None:
        """Continue with the workers that `restart_workers` started: their `runner` has no arena yet."""
        self.runner = self._reopened_runner

    def adapter_set(self) -> AdapterSet:
        """Raise AdapterRefused: workers cannot serve adapters per request."""
        raise AdapterRefused(
            "with hosts no adapters are served per request: open the engine without hosts, or with one adapter "
            "(adapter=, --adapter)"
        )

    def check_pins(self) -> None:
        """Raise InvalidRequest if texts cannot be pinned, because there is no prefix cache."""
        check_prefix_cache(self._config)

    def release(self) -> None:
        """End all workers. Safe to call again."""
        try:
            self._group.cancel_starts()
            with self._start_lock:  # a start on another thread has ended
                pass
        finally:
            self._group.close()
