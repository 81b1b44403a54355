"""What an engine says of itself, and what it gives back when memory is short."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from cortexmlx.errors import InvalidRequest
from cortexmlx.stats import BlockMap, EngineStats, MemoryPressure

if TYPE_CHECKING:
    from cortexmlx.serving.core import EngineCore
    from cortexmlx.serving.worker import Worker

T = TypeVar("T")


class Looks:
    """The part of `Engine` that asks its thread between two steps."""

    _worker: Worker

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment. Raises EngineClosed."""
        stats: EngineStats = self._worker.ask(lambda core: core.stats())
        return stats

    def blocks(self) -> BlockMap:
        """Whose every block of the KV arena is at this moment. Cheap enough to be asked a few times in a second. Raises
        EngineClosed.
        """
        blocks: BlockMap = self._worker.ask(lambda core: core.cache.block_map())
        return blocks

    def inspect(self, look: Callable[[EngineCore], T]) -> T:
        """What `look(core)` returns, called on the engine's thread between two steps: for measuring and debugging.
        Requests that are submitted meanwhile begin together. What is in the core may change with every version.
        Raises what `look` raises, and EngineClosed.
        """

        def outcome(core: EngineCore) -> tuple[T, None] | tuple[None, BaseException]:
            try:
                return look(core), None
            except BaseException as error:  # such as a sys.exit: others' requests have no part in it
                return None, error

        seen, error = self._worker.ask(outcome)
        if error is not None:
            raise error
        result: T = seen
        return result

    @property
    def longest_request(self) -> int:
        """Tokens that a prompt and its answer may have: in the context, `max_request_tokens` and the KV memory. With
        `keep_last`, whose rows go on beyond context and memory, as many as can be counted or `max_request_tokens`.
        """
        scheduler = self._worker.core.scheduler
        return scheduler.limits.room(0, scheduler.cache.capacity_tokens)

    def check_invariants(self) -> None:
        """Raise AssertionError if the engine's requests and blocks do not fit together: for tests and when in doubt.
        Takes a time that grows with the arena. Raises EngineClosed.
        """
        self._worker.ask(lambda core: core.check_invariants())

    def on_memory_pressure(self, level: MemoryPressure | str) -> None:
        """Give memory back before the system takes it: "warning" drops half of the unused prefix cache, "critical"
        all of it, the arena's free end and MLX's own buffers. Running requests go on. Raises InvalidRequest or
        EngineClosed.
        """
        try:
            critical = MemoryPressure(level) is MemoryPressure.CRITICAL
        except ValueError:
            raise InvalidRequest(f'level is {level!r}, but must be "warning" or "critical"') from None
        self._worker.ask(lambda core: core.relieve(critical))
