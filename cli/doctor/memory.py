"""What an engine found about its own memory on this machine, as lines of the doctor."""

from __future__ import annotations

from collections.abc import Iterator

from cortexmlx.cli.doctor.check import Check, Verdict
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.stats import EngineStats


def memory_checks(stats: EngineStats) -> Iterator[Check]:
    """Yield whether the KV cache was written in place, and on a GPU how a decode step is handed to it."""
    writes, buffers = stats.arena_writes, stats.command_buffers
    if writes.copied:
        size = format_bytes(writes.copied_bytes)
        detail = f"{writes.copied} of {writes.measured} measured writes copied a part of it, {size}"
        yield Check("KV cache", Verdict.WARN, detail, "this costs memory and time: please report it")
    elif writes.measured:
        yield Check("KV cache", Verdict.OK, f"written in place in all of {writes.measured} measured writes")
    else:
        yield Check("KV cache", Verdict.OK, "not measured: it is small, or others took memory at the same time")
    if buffers is None:
        return
    detail = (
        f"about {buffers.per_step} a step, each of up to {buffers.max_operations:,} kernels or "
        f"{buffers.max_elements:,} Mi elements; MLX queues {buffers.run_ahead:.0%} of a step"
    )
    if buffers.cut:
        advice = "raise MLX_MAX_OPS_PER_BUFFER and MLX_MAX_MB_PER_BUFFER: the GPU may wait between steps"
        yield Check("GPU queue", Verdict.WARN, detail, advice)
    else:
        yield Check("GPU queue", Verdict.OK, detail)
