"""The `EngineStats` of this moment."""

from __future__ import annotations

from typing import Protocol

from cortexmlx.core.adapter_registry import AdapterRegistry
from cortexmlx.core.config import EngineConfig
from cortexmlx.core.draft_model import DraftModel
from cortexmlx.core.meter import Measurements
from cortexmlx.core.recovery import Recovery
from cortexmlx.core.served_model import AttentionInUse, ServedModel
from cortexmlx.disk.connector import StoreConnector
from cortexmlx.errors import HostLost
from cortexmlx.execution.boundary import Runner
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pinned_prefixes import PinnedPrefixes
from cortexmlx.scheduling.decode_window import AHEAD
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.scheduler import Scheduler
from cortexmlx.speculation.speculation import Speculation
from cortexmlx.stats import CommandBuffers, DraftStats, EngineStats, ModelInfo, RequestStats, SpeculationStats


class Reported(Protocol):
    """The parts of an engine's core that `engine_stats` reads."""

    config: EngineConfig
    info: ModelInfo
    cache: KVCache
    scheduler: Scheduler
    runner: Runner
    measured: Measurements
    disk: StoreConnector | None
    pins: PinnedPrefixes
    adapters: AdapterRegistry
    model: ServedModel
    recovery: Recovery
    speculation: Speculation
    draft: DraftModel | None

    @property
    def backend(self) -> AttentionInUse:
        """What computes attention."""

    @property
    def kv_bytes_in_use(self) -> int:
        """Bytes of the blocks and tails that hold the tokens of running requests."""


def engine_stats(core: Reported) -> EngineStats:
    """Return the counters and gauges of a core. Only the engine's thread may call it."""
    measured, scheduler, runner = core.measured, core.scheduler, core.runner
    cache, held = core.cache.stats(), runner.bytes
    busy, keep = measured.busy.seconds, core.config.keep
    return EngineStats(
        rows_running=scheduler.rows_running,
        rows_waiting=scheduler.rows_waiting,
        max_rows=scheduler.config.max_rows,
        block_size=core.cache.block_size,
        kv_bits=core.config.kv_bits,
        kv_group_size=next((g.spec.kv_group_size for g in core.cache.groups if g.spec.kv_bits), None),
        total_blocks=cache.total_blocks,
        free_blocks=cache.free_blocks,
        used_blocks=cache.used_blocks,
        shared_blocks=cache.shared_blocks,
        cached_blocks=cache.cached_blocks,
        fragmentation=cache.fragmentation,
        single_run_share=cache.single_run_sequences / cache.sequences if cache.sequences else 1.0,
        kv_bytes=held.arena,
        kv_bytes_limit=core.cache.bytes_limit,
        kv_bytes_in_use=core.kv_bytes_in_use,
        state_bytes=held.states,
        state_snapshots=len(core.cache.states.snapshots or ()),
        adapters=core.adapters.count,
        adapter_bytes=core.adapters.nbytes,
        adapter_bytes_limit=core.adapters.limits.bytes,
        pins=len(core.pins),
        pinned_blocks=core.pins.blocks,
        steps=scheduler.steps,
        steps_by_reason={AHEAD if r is None else r.value: n for r, n in scheduler.gate.steps.items() if n},
        speculation=_speculation(core),
        prompt_tokens=measured.prompt_tokens,
        generated_tokens=measured.generated_tokens,
        requests_finished=measured.requests_finished,
        cached_tokens=scheduler.cached_tokens,
        prefilled_tokens=measured.prefilled_tokens,
        preemptions=scheduler.preemptions,
        restarts=scheduler.restarts,
        keep_first=None if keep is None else keep.first,
        keep_last=None if keep is None else keep.last,
        dropped_tokens=scheduler.dropped_tokens,
        queued=measured.queued.summary(),
        time_to_first_token=measured.first_token.summary(),
        inter_token=measured.inter_token.summary(),
        tokens_per_second=measured.generated_tokens / busy if busy else 0.0,
        plan_seconds=measured.planning.seconds,
        build_seconds=runner.build_seconds,
        wait_seconds=runner.wait_seconds,
        commit_seconds=measured.committing.seconds,
        mask_seconds=measured.masking.seconds,
        attention_backend=core.backend.describe(),
        attention_notes=core.backend.notes(),
        active_memory=held.active,
        peak_memory=held.peak,
        arena_writes=held.writes,
        command_buffers=_command_buffers(runner),
        kv_store=None if core.disk is None else core.disk.stats(),
        timeline=measured.timeline.moments(),
        sequences=tuple(_line(job, core.cache) for job in scheduler.jobs),
        requests=tuple(map(_numbers, scheduler.jobs)),
        choices=core.model.choices,
        hosts=core.model.hosts,
        host_losses=core.recovery.losses,
        draft_kv_bytes=0 if core.draft is None else core.draft.kv_bytes,
    )


def _command_buffers(runner: Runner) -> CommandBuffers | None:
    """Return those of a runner. A lost host is met by the next step, not by who looks."""
    try:
        return runner.command_buffers
    except HostLost:
        return None


def _speculation(core: Reported) -> SpeculationStats:
    """Return what was drafted."""
    measured = core.measured
    sources = {name: DraftStats(of.drafted, of.accepted) for name, of in core.speculation.counts.items() if of.drafted}
    return SpeculationStats(measured.drafted_tokens, measured.accepted_tokens, measured.verified, sources)


def _numbers(job: Job) -> RequestStats:
    """Return a job's tokens."""
    return RequestStats(
        state=job.state,
        prompt_tokens=job.prompt_length,
        cached_tokens=job.cached,
        computed_tokens=job.num_computed_tokens,
        generated_tokens=job.generated,
        max_tokens=job.max_new_tokens,
        preemptions=job.preemptions,
    )


def _line(job: Job, cache: KVCache) -> str:
    """Return a line about a job: its state, tokens and blocks."""
    where = f", blocks {cache.tables.describe(job.id)}" if job.running else ""
    most = job.prompt_length + job.max_new_tokens
    counts = f"{job.prompt_length} + {job.generated} of at most {most} tokens, {job.cached} cached"
    counts += f", {len(job.dropped)} dropped" if job.dropped else ""
    again = f", preempted {job.preemptions} times" if job.preemptions else ""
    return f"{job.state.value}: {counts}{again}{where}"
