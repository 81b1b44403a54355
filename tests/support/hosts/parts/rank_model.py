"""A rank's part of a model in the place of `InProcessModel`, so that every rank runs a core of its own.

There is no controller here. A core plans the same steps if it is asked the same, so all ranks enter the same
collectives.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import mlx.core as mx
import numpy as np

from cortexmlx.attention.backends import choose_backend
from cortexmlx.core.config import EngineConfig
from cortexmlx.core.served_model import described, scheduling_of
from cortexmlx.distributed.group import rank_options
from cortexmlx.distributed.messages import Cut, RankInfo
from cortexmlx.distributed.rank import open_rank
from cortexmlx.errors import AdapterRefused
from cortexmlx.execution.boundary import AdapterTables
from cortexmlx.execution.execution_modes import PagedMode
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.kv.sizing import Load, bytes_per_token, row_bytes
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.models import weights
from cortexmlx.scheduling.scheduler import Scheduler

_BYTES = 1 << 16


class RankModel:
    """Opens this rank's part, and sizes the cache as for the rank that keeps the most of each group."""

    def __init__(self, config: EngineConfig, cut: Cut, group: mx.distributed.Group) -> None:
        options = replace(rank_options(config, str(config.model), config.adapter), cut=cut)
        self._config = config
        self.opened = open_rank(options, group)
        told = told_by_all(self.opened.info, group)
        specs = list(dict.fromkeys(spec for groups in told for spec, _ in groups))
        layers = [dict(groups) for groups in told]
        mine = [LayerGroup(spec, layers[group.rank()].get(spec, ())) for spec in specs]
        most = [LayerGroup(spec, max((each.get(spec, ()) for each in layers), key=len)) for spec in specs]
        self.groups = tuple(most)
        self.runner = self.opened.arrange(mine)
        self.loaded = self.opened._loaded
        self.backend = choose_backend(config.attention)
        self._mode = PagedMode(self.loaded.model, self.groups)
        self._mode._runner = self.runner
        self.disk, self.draft, self.choices, self.hosts = None, None, (), ()
        info = self.opened.info
        self.info = described(self.loaded, info.vocab_size, bytes_per_token(self.groups), info.notes)

    def open_cache(self, tokens: int, snapshots: int) -> None:
        """Size the cache for so many tokens, and states of so many rows."""
        config = self._config
        memory = tokens * bytes_per_token(self.groups) or snapshots * row_bytes(self.groups)
        load = Load(config.max_rows, config.prefill_budget, config.block_size)
        self.blocks = self._mode.blocks(memory, load, self.loaded.context_length)

    def begin_cache(self, blocks: Sequence[int], anew: bool = False) -> KVCache:
        return self._mode.begin(tuple(blocks), PrefixCache(self._config.block_size))

    def begin_scheduler(self, cache: KVCache) -> Scheduler:
        context, vocab_size = self.loaded.context_length, self.info.vocab_size
        return Scheduler(cache, scheduling_of(self._config, context, vocab_size))

    def adapters(self) -> AdapterTables:
        raise AdapterRefused("ranks have none")

    def begin_store(self) -> None:
        pass

    def release(self) -> None:
        self.runner.close()
        weights.release(self.loaded.model)


def told_by_all(info: RankInfo, group: mx.distributed.Group) -> list[list[tuple[KVSpec, tuple[int, ...]]]]:
    """What the layers of every rank keep, by rank."""
    told: Any = [(asdict(each.spec), list(each.layers)) for each in info.groups]
    text = np.frombuffer(json.dumps(told).encode(), np.uint8)
    mine = mx.array(np.pad(text, (0, _BYTES - len(text)))[None])
    every = np.array(mx.distributed.all_gather(mine, group=group, stream=mx.cpu))
    return [[(KVSpec(**spec), tuple(layers)) for spec, layers in json.loads(bytes(row).rstrip(b"\0"))] for row in every]
