"""The engine's core without its thread: a test decides what happens between two steps."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from cortexmlx.core.config import EngineConfig
from cortexmlx.core.core import EngineCore
from cortexmlx.core.handle import RequestHandle
from cortexmlx.core.text import StopConditions, ThinkingLimit
from cortexmlx.execution import execution_modes
from cortexmlx.kv.sizing import bytes_per_token, row_state_bytes
from cortexmlx.models import load_model
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.structured.calls.format import AllowedCalls
from cortexmlx.structured.compiler import GrammarCompiler
from cortexmlx.structured.output import Thoughts
from cortexmlx.types.request import Completion, QueuedRequest
from cortexmlx.types.sampling_params import SamplingParams
from support.patience import PATIENCE, soon


class Driver:
    """Requests into an `EngineCore`, one step at a time, on the test's own thread."""

    def __init__(self, model: Path, *, tokens: int = 512, snapshots: int = 16, **config: Any) -> None:
        """`tokens` of KV memory, and room for `snapshots` of a row's state; `config` as in `EngineConfig`."""
        per_token, per_row, alone = _sizes(
            str(model), config.get("kv_bits"), config.get("kv_group_size"), execution_modes.probe_kv_specs
        )
        memory = (tokens * per_token or snapshots * per_row) + (per_row if alone else 0)
        # How much a step computes does not depend on how long the last ones took, unless a test wants that.
        timeless = {"token_target": None, "speculate": "draft" in config}
        settings = {"block_size": 8, "max_rows": 4, "prefill_budget": 32} | timeless | config
        self.calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.core = EngineCore(EngineConfig(str(model), kv_memory=memory, **settings), self.calls.put)
        self.tokenizer = SharedTokenizer(self.core.loaded.tokenizer)
        self.grammars = GrammarCompiler(self.tokenizer, self.core.info.vocab_size)
        self._requests = 0

    def limit_blocks(self, tokens: int) -> None:
        """Allow no more blocks than `tokens` need, if blocks take no bytes, as without attention layers."""
        cache = self.core.cache
        if not any(group.layers for group in cache.groups):
            cache.pools.max_blocks = cache.pools.configured_blocks = (tokens // cache.block_size,)
            cache.pools.shrink(1)

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int | None = 32,
        seed: int = 0,
        client: str | None = None,
        cache: bool = True,
        thoughts: Thoughts | None = None,
        calls: AllowedCalls | None = None,
        adapter: str | None = None,
        **params: Any,
    ) -> RequestHandle:
        """Queue a request, as the engine would between two steps. `thoughts` and `calls` are those of its prompt."""
        self._requests += 1
        handle = RequestHandle(self._requests, self.core.cancel)
        asked = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True} | params)
        asked.validate()
        now, tokenizer = time.perf_counter(), self.core.loaded.tokenizer
        request = QueuedRequest(tuple(prompt), asked, seed, now, client, cache=cache, thoughts=thoughts, calls=calls)
        reader = self.core.model.images
        images = None if reader is None else reader.find_images(request.prompt)
        request = replace(request, adapter=adapter, images=images)
        stops = StopConditions.from_params(asked, tokenizer.eos_token_ids, thoughts)
        vocabulary = self.core.info.vocab_size
        limit = ThinkingLimit.for_request(asked.max_thinking_tokens, thoughts, self.encode, vocabulary)
        self.core.add(request, handle, replace(stops, thinking=limit), self.grammars.compile_request(request))
        return handle

    def encode(self, text: str, special: bool = False) -> Sequence[int]:
        """The tokens of a text, without those that a tokenizer adds unless they are asked for."""
        return self.tokenizer.encode(text, special)

    def step(self, count: int = 1) -> None:
        """Some steps, or fewer if there is nothing left to do. Workers that are lost in one are there after it."""
        for _ in range(count):
            if not self.core.idle:
                self.core.step()
                self.await_start()

    def await_start(self) -> None:
        """Wait until lost workers are started again, if they are being started."""
        while self.core.recovery.is_starting:
            self.calls.get(timeout=PATIENCE)(self.core)

    def finish(self) -> None:
        """Steps until everything has ended."""
        for _ in range(10_000):
            while self.core.idle and self.core.scheduler.jobs:  # all wait for disk loads
                self.calls.get(timeout=PATIENCE)(self.core)
            while not self.calls.empty():
                self.calls.get()(self.core)
            if self.core.idle and not self.core.scheduler.jobs:
                return self.await_start()
            self.core.step()
        raise AssertionError("the core never comes to an end")

    def finish_resizing(self, every: int) -> int:
        """`finish`, with critically little memory after every so many steps. Returns how many sizes the arena had."""
        sizes = set()
        for step in range(10_000):
            if self.core.idle:
                break
            self.core.step()
            sizes.add(self.core.runner.arena.blocks)
            if step % every == 0:
                self.core.relieve(True)
        return len(sizes)

    def answers(self, prompts: Sequence[Sequence[int]], max_tokens: int = 32, **params: Any) -> list[tuple[int, ...]]:
        """The tokens of the answers to all prompts, asked at once."""
        handles = [self.add(p, max_tokens, **params) for p in prompts]
        self.finish()
        return [self.result(h).token_ids for h in handles]

    def result_of(self, prompt: Sequence[int], max_tokens: int | None, **params: Any) -> Completion:
        """The whole answer to one prompt."""
        handle = self.add(prompt, max_tokens, **params)
        self.finish()
        return self.result(handle)

    @staticmethod
    def result(handle: RequestHandle) -> Completion:
        """The result of a request that has ended."""
        return handle.result(0)


@cache
def _sizes(
    model: str, kv_bits: int | None, kv_group_size: int | None, probe: Callable[[Any], Any]
) -> tuple[int, int, bool]:
    """Bytes of a token and of a row's state, and whether the model runs one request at a time. `probe` decides that."""
    chosen = execution_modes.choose_execution_mode(load_model(model).model, kv_bits, kv_group_size)
    return bytes_per_token(chosen.groups), row_state_bytes(chosen.groups), chosen.max_rows is not None


def assert_nothing_lost(stats: Any) -> None:
    """Every block is free and no row is taken."""
    assert stats.free_blocks == stats.total_blocks
    assert (stats.rows_running, stats.rows_waiting, stats.kv_bytes_in_use) == (0, 0, 0)


def finally_nothing_lost(engine: Any) -> None:
    """The same of an engine, soon: cancelled requests need a step to leave, and one more for what is in flight."""

    def empty() -> bool:
        stats = engine.stats()
        return not stats.rows_running and not stats.rows_waiting and not stats.used_blocks

    soon(empty)
    assert_nothing_lost(engine.stats())
