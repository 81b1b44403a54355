"""The peak memory of a run: arithmetic for what is allocated once, and the engine's own steps, traced on the model's
skeleton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cortexmlx.cli.planning.figures import EXPANDED, MachineFigures
from cortexmlx.cli.planning.machine import TargetMachine
from cortexmlx.cli.planning.skeleton import Skeleton, model_as_loaded
from cortexmlx.kv import sizing
from cortexmlx.kv.spec import GroupCounts, LayerGroup, paged_groups

if TYPE_CHECKING:
    from cortexmlx.core.config import EngineConfig
    from cortexmlx.execution.execution_modes import ExecutionMode


@dataclass(frozen=True)
class RunFigures:
    """Memory of a run of several rows at once, in bytes. All of the cache is in use, for running rows or prefixes."""

    tokens: int
    """Tokens of each row at its end: prompt and answer."""
    rows: int
    weight_bytes: int
    image_bytes: int
    """As in `MachineFigures`."""
    arena_bytes: int
    """The arena, with two spare blocks."""
    states_bytes: int
    snapshot_bytes: int
    tail_bytes: int
    prefill_bytes: int
    """Temporary memory of the largest step with a piece of a prompt."""
    verify_bytes: int
    """Temporary memory of the largest step that verifies drafts."""
    decode_bytes: int
    """Temporary memory of the largest decode step, without its new tail."""
    growth_bytes: int
    """The old slab of one layer, which exists beside the new one for a moment while the arena grows."""
    peak_bytes: int
    """The most that MLX has in use, with the weights. Of the temporary memory, only the largest part counts."""


def plan_runs(
    skeleton: Skeleton,
    machine: TargetMachine,
    figures: MachineFigures,
    config: EngineConfig,
    load: sizing.ArenaDemand,
    lengths: Sequence[int],
) -> tuple[RunFigures, ...]:
    """Return what memory a run takes on this machine, for sequences of each of these lengths.

    Lengths that do not fit the context or the cache have no run. Models that are not paged have none either, and
    neither has a cache of the default size without room.
    """
    from cortexmlx.execution.execution_modes import PagedMode, choose_execution_mode
    from cortexmlx.speculation.speculation import MAX_STEP_DRAFTS

    if not lengths or skeleton.refusal is not None or skeleton.most_rows is not None:
        return ()
    model = model_as_loaded(skeleton, machine.on_cpu, figures.weights_as == EXPANDED)
    mode = choose_execution_mode(model, config.kv_bits, config.kv_group_size)
    memory = config.kv_bytes or figures.arena_bytes + figures.snapshot_bytes
    if not isinstance(mode, PagedMode) or not memory:
        return ()
    if config.keep is None:
        fitting_lengths = [tokens for tokens in lengths if tokens <= skeleton.context_length]
    else:
        fitting_lengths = [min(tokens, config.keep.max_row_tokens) for tokens in lengths]
    step_drafts = 0 if config.reproducible else MAX_STEP_DRAFTS  # grammars force tokens where nothing else drafts
    runs = (plan_run(skeleton, mode, figures, load, memory, tokens, step_drafts) for tokens in fitting_lengths)
    return tuple(run for run in runs if run is not None)


def plan_run(
    skeleton: Skeleton,
    mode: ExecutionMode,
    figures: MachineFigures,
    load: sizing.ArenaDemand,
    memory: int,
    tokens: int,
    step_drafts: int,
) -> RunFigures | None:
    """Return the memory of a run: sequences of `tokens` tokens, and a cache of `memory` bytes. As many sequences run at
    once as fit, at most `load.rows`. Return None if not even one fits. Raises InvalidRequest if the cache holds
    no block.
    """
    from cortexmlx.execution.largest_steps import predict_step_bytes

    blocks = mode.count_blocks(memory, load, skeleton.context_length)
    groups = paged_groups(mode.groups)
    rows = min(load.rows, sizing.sequences_that_fit(groups, blocks, load.block_size, tokens))
    if not rows:
        return None
    slabs = [_slab_bytes(group, count, load.block_size) for group, count in zip(groups, blocks, strict=True)]
    arena = sum(size * len(group.layers) for group, size in zip(groups, slabs, strict=True))
    _, snapshots = sizing.split_memory(mode.groups, memory, load.rows)
    state = sizing.row_state_bytes(mode.groups)
    step = predict_step_bytes(
        skeleton.model,
        mode.groups,
        mode.choose_backend("auto").attend,
        skeleton.vocab_size,
        replace(load, rows=rows),
        tokens,
        step_drafts,
    )
    tail_bytes = sizing.tail_bytes(mode.groups, rows) // 2
    blocks_before = _blocks_before_growth(blocks, load.block_size)
    growth = max(_slab_bytes(group, count, load.block_size) for group, count in zip(groups, blocks_before, strict=True))
    state_bytes, snapshot_bytes = rows * state, snapshots * state
    peak = (
        figures.weight_bytes
        + figures.image_bytes
        + arena
        + state_bytes
        + snapshot_bytes
        + max(step.prefill, step.verify, tail_bytes + step.decode, growth)
    )
    return RunFigures(
        tokens,
        rows,
        figures.weight_bytes,
        figures.image_bytes,
        arena,
        state_bytes,
        snapshot_bytes,
        tail_bytes,
        step.prefill,
        step.verify,
        step.decode,
        growth,
        peak,
    )


def _blocks_before_growth(blocks: GroupCounts, block_size: int) -> GroupCounts:
    """Return each group's blocks before the arena's last growth (at most a doubling each time); 0 if it never grew."""
    sizes = []
    for count in blocks:
        size = sizing.initial_blocks(count, block_size)
        while 2 * size < count:
            size *= 2
        sizes.append(size if size < count else 0)
    return tuple(sizes)


def _slab_bytes(group: LayerGroup, blocks: int, block_size: int) -> int:
    """Return the bytes of one layer's slab, with the null block and the scratch block."""
    return group.spec.bytes_per_token * (blocks + 2) * block_size if blocks else 0
