"""Engines for a benchmark: with as much KV memory as its tests need, and one copy of the weights for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from cortexmlx.engine import Engine
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.machine import memory_bytes
from cortexmlx.stats import ModelInfo

if TYPE_CHECKING:
    from cortexmlx.serving.core import EngineCore


@dataclass(frozen=True)
class Plan:
    """What holds for every test: the model, lines about it, KV memory in bytes (None: what the tests need), the
    attention backend, repetitions, the prompts' seed, whom to tell what is running, the model's adapter, how keys
    and values are quantized, and the `rounds` in which rows are measured, each with engines that were opened for it.
    """

    model: str
    notes: tuple[str, ...]
    kv_memory: int | None
    attention: str
    repetitions: int
    seed: int
    on_run: Callable[[str], None] | None
    adapter: str | None = None
    kv_bits: int | None = None
    kv_group_size: int | None = None
    rounds: int = 1

    def turns(self) -> list[range]:
        """The repetitions of each round, as evenly as may be; numbers from 0."""
        rounds = min(self.rounds, self.repetitions)
        ends = [self.repetitions * n // rounds for n in range(rounds + 1)]
        return [range(*pair) for pair in pairwise(ends)]

    def tell(self, what: str) -> None:
        """Say what is running to whoever wants to know."""
        if self.on_run is not None:
            self.on_run(what)

    @property
    def settings(self) -> dict[str, str]:
        """The options of the engine that change figures."""
        kv = (
            "plain" if self.kv_bits is None else f"{self.kv_bits} bits in groups of {self.kv_group_size or 'the usual'}"
        )
        return {"attention": self.attention, "keys and values": kv, "adapter": self.adapter or "none"}


def open_engines(
    plan: Plan,
    stack: ExitStack,
    sizes: Sequence[tuple[int, int]],
    max_rows: int,
    check: Callable[[ModelInfo], None] = lambda info: None,
    **options: Any,
) -> dict[int, Engine]:
    """An engine for each (block size, tokens that it must hold), closed with `stack`. Weights are in memory once, but
    twice while another engine opens. An engine has its default memory if that is enough, else as much as it needs.
    `check` may raise for the model, before memory is asked for; `options` are the engine's.
    """
    engines: dict[int, Engine] = {}
    weights: Any = None
    for block_size, tokens in sizes:

        def opened(memory: int | None, block_size: int = block_size) -> Engine:
            plan.tell(f"loading {plan.model}, block size {block_size}")
            return Engine(
                plan.model,
                adapter=plan.adapter,
                kv_memory=memory,
                kv_bits=plan.kv_bits,
                kv_group_size=plan.kv_group_size,
                block_size=block_size,
                max_rows=max_rows,
                attention=plan.attention,
                on_progress=lambda progress: plan.tell(f"{progress.what} {plan.model}: {progress.fraction:.0%}"),
                **options,
            )

        engine = opened(plan.kv_memory)
        try:
            check(engine.info)
        except BaseException:
            engine.close()
            raise
        needed = (tokens + block_size) * engine.info.kv_bytes_per_token
        if plan.kv_memory is None and engine.stats().kv_bytes_limit < needed:
            engine.close()
            if needed > memory_bytes():
                raise InvalidRequest(
                    f"the tests need {format_bytes(needed)} for {tokens:,} tokens of keys and values at once, and this "
                    f"machine has {format_bytes(memory_bytes())}: fewer sequences (-b), or shorter ones"
                )
            engine = opened(needed)
        engines[block_size] = stack.enter_context(engine)
        if weights is None:
            weights = engine.inspect(lambda core: core.loaded.model.parameters())
        else:
            _share(engine, weights)
    return engines


def _share(engine: Engine, weights: Any) -> None:
    """Let an engine compute with another's weights, and its own go."""

    def share(core: EngineCore) -> None:
        core.loaded.model.update(weights)
        mx.clear_cache()

    engine.inspect(share)
