"""A rank's part of a model in the place of `OpenedModel`, so that every rank runs a core of its own.

There is no controller here. A core plans the same steps if it is asked the same, so all ranks enter the same
collectives.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import mlx.core as mx
import numpy as np

from cortexmlx.attention.backends import choose_backend
from cortexmlx.execution.mode import PagedMode
from cortexmlx.hosts.options import Cut, RankInfo, RankOptions
from cortexmlx.hosts.rank import open_rank
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.kv.sizing import Load, bytes_per_token, row_bytes
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.models import weights
from cortexmlx.scheduling.config import SchedulerConfig
from cortexmlx.scheduling.scheduler import Scheduler
from cortexmlx.serving.config import EngineConfig
from cortexmlx.stats import ModelInfo

_BYTES = 1 << 16


class RankModel:
    """Opens this rank's part, and sizes the cache as for the rank that keeps the most of each group."""

    def __init__(self, config: EngineConfig, cut: Cut, group: mx.distributed.Group) -> None:
        options = RankOptions(
            model=str(config.model),
            adapter=config.adapter,
            dequantize=config.dequantize,
            kv_bits=config.kv_bits,
            kv_group_size=config.kv_group_size,
            block_size=config.block_size,
            attention=config.attention,
            reproducible=config.reproducible,
            max_rows=config.max_rows,
            prefill_budget=config.prefill_budget,
            cut=cut,
        )
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
        self.info = ModelInfo(
            name=info.name,
            path="",
            architecture=info.architecture,
            context_length=info.context_length,
            vocab_size=info.vocab_size,
            parameters=info.parameters,
            weight_bytes=info.weight_bytes,
            dtype=info.dtype,
            kv_bytes_per_token=bytes_per_token(self.groups),
            chat_template=True,
            notes=info.notes,
        )
        self.tokens = 0

    def open_cache(self, tokens: int, snapshots: int) -> None:
        """Size the cache for so many tokens, and states of so many rows."""
        config = self._config
        memory = tokens * bytes_per_token(self.groups) or snapshots * row_bytes(self.groups)
        load = Load(config.max_rows, config.prefill_budget, config.block_size)
        self.blocks = self._mode.blocks(memory, load, self.loaded.context_length)

    def begin_cache(self, blocks: Sequence[int]) -> KVCache:
        return self._mode.begin(tuple(blocks), PrefixCache(self._config.block_size))

    def begin_scheduler(self, cache: KVCache) -> Scheduler:
        config = self._config
        scheduling = SchedulerConfig(
            max_rows=config.max_rows,
            prefill_budget=config.prefill_budget,
            context_length=self.loaded.context_length,
            vocab_size=self.info.vocab_size,
            max_request_tokens=config.max_request_tokens,
            client_tokens=config.client_tokens,
            token_target=config.token_target,
            keep=config.keep,
            pipeline=config.pipeline,
            long_tail_rows=0,
            share_prefixes=config.prefix_cache,
            share_between_clients=config.share_prefixes_between_clients,
        )
        return Scheduler(cache, scheduling)

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
