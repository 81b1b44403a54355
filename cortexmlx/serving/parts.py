"""EngineParts: model, arena, cache, scheduler and runner of one engine, opened as its configuration says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import mlx.core as mx

from cortexmlx.attention.backends import automatic
from cortexmlx.errors import InvalidRequest, ModelCorrupt
from cortexmlx.execution.boundary import Refused
from cortexmlx.execution.disk import Disk, StoreOpening, not_stored
from cortexmlx.execution.way import way_of
from cortexmlx.kv.pins import Pins
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.kv.sizing import Load, beyond_note, bytes_per_token, check_kv_memory, default_kv_bytes, reserved_bytes
from cortexmlx.kv.spec import Counts
from cortexmlx.machine import memory_bytes, working_set_bytes
from cortexmlx.models import LoadedModel, load_model, weights
from cortexmlx.models.tokenizers.templates import variables_read
from cortexmlx.scheduling.scheduler import Scheduler
from cortexmlx.serving.config import EngineConfig
from cortexmlx.stats import ModelInfo

Call = Callable[[Any], None]
"""What is to be done with an engine's core between two steps."""

_BLOCKS_AT_ONCE = 256
"""How many blocks compaction copies at a time: bounds its memory."""


class EngineParts:
    """What an engine is made of. Only the engine's thread may use it."""

    def __init__(self, config: EngineConfig, wake: Callable[[Call], None] = lambda call: None) -> None:
        """`wake(call)` has a call carried out between two steps; threads of the core's own use it."""
        self.config = config
        if config.kv_bytes is not None:
            check_kv_memory(config.kv_bytes, memory_bytes(), working_set_bytes())
        self._store: StoreOpening | None = None
        if config.kv_store is not None and config.prefix_cache:
            self._store = StoreOpening(config.kv_store, config.store_bytes, lambda call: wake(lambda core: call()))
        self.disk: Disk | None = None
        try:
            self._load()
            self._open(wake)
        except BaseException:
            self.release()
            raise

    def _load(self) -> None:
        """Load the model; its weights are hashed meanwhile if there is a store."""
        config, store = self.config, self._store
        self.loaded = load_model(
            config.model,
            adapter=config.adapter,
            dequantize=config.dequantize,
            on_progress=config.on_progress,
            weights_hash=None if store is None else store.weights,
        )
        if store is not None:
            store.weights.check(self.loaded.model)

    def _open(self, wake: Callable[[Call], None]) -> None:
        """Whatever needs the model."""
        config = self.config
        self._way = way_of(self.loaded.model, config.kv_bits, config.kv_group_size)
        groups = self._way.groups
        vocab_size = _checked_vocab_size(self.loaded)
        load = Load(config.max_rows, config.prefill_budget, config.block_size)
        context = self.loaded.context_length
        longest = context if config.keep is None else min(context, config.keep.most)
        reserved = reserved_bytes(groups, load.rows, vocab_size, self.loaded.weight_bytes)
        self._notes = beyond_note(config.kv_bytes or 0, max(working_set_bytes() - reserved, 0))
        memory = config.kv_bytes or default_kv_bytes(groups, load, longest, working_set_bytes(), reserved)
        self.disk = self._opened_disk(wake)
        self._assemble(self._way.blocks(memory, load, longest), vocab_size)

    def _assemble(self, blocks: Counts, vocab_size: int) -> None:
        """All that needs the model and the store to be there."""
        config, context = self.config, self.loaded.context_length
        self.backend = self._way.backend(config.attention)
        self.runner = self._way.runner(config.block_size, vocab_size, self.backend)
        self._begin_empty(blocks)
        self.pins = Pins(self.cache)
        if config.keep is not None:
            config.keep.check(context, self.cache.capacity_tokens)
        if self.disk is not None and self._store is not None:
            self.disk.begin(self.runner)
            self._store.begin(self.disk, self.loaded.model)
        self.info = ModelInfo(
            name=self.loaded.name,
            path=str(self.loaded.path),
            architecture=str(self.loaded.config.get("model_type", "unknown")),
            context_length=context,
            vocab_size=vocab_size,
            parameters=self.loaded.parameters,
            weight_bytes=self.loaded.weight_bytes,
            dtype=self.loaded.dtype,
            kv_bytes_per_token=bytes_per_token(self._way.groups),
            chat_template=bool(self.loaded.tokenizer.has_chat_template),
            notes=self.loaded.notes
            + self._notes
            + self._way.notes
            + (not_stored(self._way) if config.kv_store else ()),
            adapter=None if self.loaded.adapter is None else str(self.loaded.adapter),
            identity=self.loaded.identity,
            template_vars=_template_vars(self.loaded),
            sampling=tuple(self.loaded.sampling.items()),
        )

    def _opened_disk(self, wake: Callable[[Call], None]) -> Disk | None:
        """The tier below, if one is asked for and can be had."""
        if self._store is None:
            return None
        attention = automatic() if self.config.attention == "auto" else self.config.attention
        return self._store.disk(
            self.loaded,
            self._way,
            (self.config.block_size, attention),
            arrived=lambda wish, pieces: wake(lambda core: core.scheduler.arrived(wish, pieces)),
        )

    def _begin_empty(self, blocks: Counts) -> None:
        """An empty arena of at most `blocks` blocks in each group, and a scheduler without requests."""
        config, most = self.config, self._way.most_rows
        self.cache = self._way.begin(blocks, PrefixCache(config.block_size))
        if self.disk is not None:
            self.disk.attach(self.cache)
        self.scheduler = Scheduler(
            self.cache,
            max_rows=min(config.max_rows, most or config.max_rows),
            prefill_budget=config.prefill_budget,
            context_length=self.loaded.context_length,
            max_request_tokens=config.max_request_tokens,
            client_tokens=config.client_tokens,
            token_target=config.token_target,
            keep=config.keep,
            pipeline=config.pipeline and self._way.pipelined,
            share_prefixes=config.prefix_cache,
            share_between_clients=config.share_prefixes_between_clients,
        )

    def pin(self, tokens: Sequence[int], client: str | None) -> tuple[int, int]:
        """Pin a text that a client's requests begin with: see `Pins.add`. Raises InvalidRequest where it has no use."""
        if self._way.most_rows is not None:
            name = self.loaded.name
            raise InvalidRequest(
                f"{name} runs on mlx-lm's own caches, which keep the last text alone: none can be pinned"
            )
        if not self.config.prefix_cache:
            raise InvalidRequest("the engine computes every prompt anew (prefix_cache=False): there is nothing to pin")
        return self.pins.add(tokens, None if self.scheduler.share_between_clients else client)

    def _move_together(self) -> int | Refused:
        """Move cached blocks together so that what is free is one run. Nothing may be running. Returns how many blocks
        moved.
        """
        copies = self.cache.compact()
        for start in range(0, len(copies), _BLOCKS_AT_ONCE):
            if refused := self.runner.copy(copies[start : start + _BLOCKS_AT_ONCE]):
                return refused
        return len(copies)

    def _give_end_back(self) -> Refused | None:
        """Bring the arena to the cache's size; where the system refuses the smaller one, it stays as it is."""
        refused = self.runner.resize(self.cache.blocks)
        self.runner.trim()
        if refused is None or not refused.of_arena:
            return refused
        self.cache.grow(self.runner.blocks)
        return None

    @property
    def kv_bytes_in_use(self) -> int:
        """Bytes of the blocks and tails that hold the tokens of running requests."""
        return self.cache.bytes_in_use + (self.runner.bytes.tail if self.scheduler.rows_running else 0)

    def release(self) -> None:
        """Free all memory at once, whatever an app still refers to: a closed engine, its handles, an error with a
        traceback. So the parts are emptied, not only dropped. Nothing here is of use afterwards. Safe to call again.
        """
        parts = vars(self)
        with ExitStack() as ends:  # the last one comes first, and all of them come whatever one raises
            ends.callback(mx.clear_cache)
            ends.callback(self._forget)
            if "loaded" in parts:
                ends.callback(weights.release, self.loaded.model)
            if "runner" in parts:
                ends.callback(self.runner.close)
            if self.disk is not None:
                ends.callback(self.disk.close)
            if self._store is not None:
                ends.callback(self._store.cancel)

    def _forget(self) -> None:
        """Drop the parts, those too that could not be emptied: who calls `release` again would wait for ever."""
        self.disk = None
        for name in ("runner", "loaded", "_way"):
            vars(self).pop(name, None)


def _template_vars(loaded: LoadedModel) -> tuple[str, ...]:
    """What the chat template reads. One that is broken is told of when messages are to be rendered."""
    try:
        return tuple(sorted(variables_read(loaded.tokenizer) or ()))
    except InvalidRequest:
        return ()


def _checked_vocab_size(loaded: LoadedModel) -> int:
    """Width of the model's logits: what its last projection really has. Raises ModelCorrupt if they are no numbers:
    sampling would answer with the first token of the vocabulary again and again.
    """
    logits = loaded.model(mx.zeros((1, 1), mx.int32))
    if mx.any(mx.isnan(logits)).item():
        raise ModelCorrupt(
            f"{loaded.name} computes what is no number (NaN): its weights are damaged, or its configuration is not "
            "theirs. Download it again."
        )
    return int(logits.shape[-1])
