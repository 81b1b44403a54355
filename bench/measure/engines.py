"""Engines for a benchmark: with the KV memory that its tests need, and one copy of the weights for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from cortexmlx.engine import Engine
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.stats import ModelInfo
from cortexmlx.system.machine import memory_bytes

if TYPE_CHECKING:
    from cortexmlx.core.core import EngineCore


@dataclass(frozen=True)
class BenchPlan:
    """The settings that all tests of a benchmark share: model, KV memory, attention backend, repetitions, seed."""

    model: str
    notes: tuple[str, ...]
    """Lines about the model for the report."""
    kv_memory: int | None
    """Bytes of KV memory; None: as much as the tests need."""
    attention: str
    """The attention backend."""
    repetitions: int
    seed: int
    """The seed of the prompts."""
    on_run: Callable[[str], None] | None
    """Called with a line that says what is running."""
    adapter: str | None = None
    kv_bits: int | None = None
    """Bits of quantized keys and values; None: not quantized."""
    kv_group_size: int | None = None
    draft: str | None = None
    """The draft model."""
    hosts: str | None = None
    """The hosts that the model is spread over; None: it is in this process."""

    def report_progress(self, message: str) -> None:
        """Pass the line `message` to `on_run`, if it is set."""
        if self.on_run is not None:
            self.on_run(message)

    @property
    def settings(self) -> dict[str, str]:
        """The engine options that affect the results, by name, for the report."""
        kv = (
            "plain" if self.kv_bits is None else f"{self.kv_bits} bits in groups of {self.kv_group_size or 'the usual'}"
        )
        optional_settings = {"draft": self.draft, "hosts": self.hosts}
        return {
            "attention": self.attention,
            "keys and values": kv,
            "adapter": self.adapter or "none",
            **{name: value for name, value in optional_settings.items() if value is not None},
        }


def open_engines(
    plan: BenchPlan,
    stack: ExitStack,
    sizes: Sequence[tuple[int, int]],
    max_rows: int,
    check: Callable[[ModelInfo], None] = lambda info: None,
    **options: Any,
) -> dict[int, Engine]:
    """Open an engine for each of `sizes`: (block size, tokens to hold). `stack` closes them. Return them by block size.

    The weights are in memory once, but twice while another engine opens. Without `plan.kv_memory`, an engine has its
    default memory if that is enough, else as much as it needs. `check` may raise for the model, before more memory is
    asked for. `options` are the engine's.

    Raises InvalidRequest if the tests need more memory than the machine has.
    """
    engines: dict[int, Engine] = {}
    weights: Any = None
    for block_size, tokens in sizes:

        def open_engine(memory: int | None, block_size: int = block_size) -> Engine:
            plan.report_progress(f"loading {plan.model}, block size {block_size}")
            return Engine(
                plan.model,
                adapter=plan.adapter,
                draft=plan.draft,
                hosts=plan.hosts,
                kv_memory=memory,
                kv_bits=plan.kv_bits,
                kv_group_size=plan.kv_group_size,
                block_size=block_size,
                max_rows=max_rows,
                attention=plan.attention,
                on_progress=lambda progress: plan.report_progress(
                    f"{progress.what} {plan.model}: {progress.fraction:.0%}"
                ),
                **options,
            )

        engine = open_engine(plan.kv_memory)
        try:
            check(engine.info)
        except BaseException:
            engine.close()
            raise
        draft_bytes_per_token = (
            0 if engine.info.draft is None else engine.info.draft.kv_bytes_per_token
        )  # they share the memory
        needed_bytes = (tokens + block_size) * (engine.info.kv_bytes_per_token + draft_bytes_per_token)
        if plan.kv_memory is None and engine.stats().kv_bytes_limit < needed_bytes:
            engine.close()
            if needed_bytes > memory_bytes():
                raise InvalidRequest(
                    f"the tests need {format_bytes(needed_bytes)} for {tokens:,} tokens of keys and values at once, "
                    f"and this machine has {format_bytes(memory_bytes())}: fewer sequences (-b), or shorter ones"
                )
            engine = open_engine(needed_bytes)
        engines[block_size] = stack.enter_context(engine)
        if plan.hosts is not None:
            continue  # the weights are in the workers of each engine
        if weights is None:
            weights = engine.inspect(lambda core: core.loaded.model.parameters())
        else:
            _set_weights(engine, weights)
    return engines


def share_weights(engine: Engine, source_engine: Engine) -> None:
    """Let `engine` compute with the weights of `source_engine`, which has the same model, and free its own weights."""
    _set_weights(engine, source_engine.inspect(lambda core: core.loaded.model.parameters()))


def _set_weights(engine: Engine, weights: Any) -> None:
    def replace_weights(core: EngineCore) -> None:
        core.loaded.model.update(weights)
        mx.clear_cache()

    engine.inspect(replace_weights)
