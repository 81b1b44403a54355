"""The figures of a memory plan: what a model takes, what a machine has, and what fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cortexmlx.cli.planning.machine import TargetMachine, machine_phrase
from cortexmlx.cli.planning.skeleton import Skeleton
from cortexmlx.cli.planning.source import PlanSource
from cortexmlx.kv import sizing
from cortexmlx.kv.spec import ITEMSIZE, GroupCounts, LayerGroup, describe_quantization, paged_groups
from cortexmlx.scheduling.keep_policy import KeepPolicy

if TYPE_CHECKING:
    from cortexmlx.execution.sight_memory import SightBytes

EXPANDED = "float32, for speed on a CPU"
"""The value of `weights_as` if packed weights are unpacked in memory."""

LENGTHS = (4096, 16384, 65536, 262144, 1048576)


@dataclass(frozen=True)
class ModelFigures:
    """The memory of a model by itself, in the precision in which it is stored."""

    name: str
    architecture: str
    parameters: int
    context_length: int
    weight_bytes: int
    """Bytes of the files."""
    adapter_bytes: int
    dtype: str
    groups: tuple[LayerGroup, ...]
    itemsize: int
    kv_bytes_per_token: int
    state_bytes_per_sequence: int
    """Bytes of one sequence's state, whatever its length."""
    refusal: str | None
    """Why the engine does not run the model; None if it does."""
    notes: tuple[str, ...] = ()
    """How the engine runs the model, if not in the usual way."""


@dataclass(frozen=True)
class LengthFigures:
    """The KV memory of one context length, and how many sequences of that length fit."""

    tokens: int
    bytes: int
    """Bytes of one sequence of this length."""
    sequences: int
    """Sequences of this length that fit at once."""


@dataclass(frozen=True)
class MachineFigures:
    """The memory of a model on a machine, in bytes."""

    assumed: bool
    """Whether the machine is not this one, but a Mac with that memory."""
    memory_bytes: int
    working_set_bytes: int
    weight_bytes: int
    weights_as: str
    itemsize: int
    kv_form: str
    """What a cached number takes, in words."""
    kv_bytes_per_token: int
    tail_bytes: int
    logits_bytes: int
    states_bytes: int
    draft_bytes: int
    """What a draft model takes without keys and values: weights, tails and logits."""
    draft_kv_bytes: int
    """Its part of the KV memory, beside `arena_bytes`."""
    image_bytes: int
    """What a model that sees takes beside: its vision tower, the features that are kept, and the largest image."""
    reserved_bytes: int
    """What is taken whatever is cached: weights, tails, logits, states, drafts without KV memory, and images."""
    free_bytes: int
    fits: int | None
    """Tokens of the longest single sequence in `free_bytes`, whatever the context. None if its length costs nothing."""
    limited: bool
    """Whether the arena's bytes were given. `lengths` are then what the arena holds, otherwise what `free_bytes`
    hold.
    """
    arena_bytes: int
    arena_tokens: int
    snapshots: int
    snapshot_bytes: int
    row_tokens: int | None
    """Tokens that a row keeps, at most. None for all."""
    longest_text: int
    """Tokens of the longest text that has room, or those that a row keeps of it."""
    total_bytes: int
    """All of it with a full cache, without the temporary memory of steps."""
    lengths: tuple[LengthFigures, ...]


@dataclass(frozen=True)
class MemoryPlan:
    """The memory figures that `cortexmlx plan` shows: the model alone, and on a machine."""

    model: ModelFigures
    here: MachineFigures


def make_plan(
    source: PlanSource,
    skeleton: Skeleton,
    machine: TargetMachine,
    *,
    load: sizing.ArenaDemand,
    kv_memory: int | None = None,
    keep: KeepPolicy | None = None,
    lengths: tuple[int, ...] = (),
    draft: Skeleton | None = None,
    sees: bool = True,
) -> MemoryPlan:
    """Compute the memory plan of `skeleton`, by itself and on `machine`, with `draft` as its draft model.

    `kv_memory` sets the bytes of both arenas, `keep` the tokens of a row. `sees`: images are seen if the model can.
    Raises InvalidRequest if a row could not have that many tokens.
    """
    stored_bytes = skeleton.weight_bytes if source.weight_bytes is None else source.weight_bytes
    size = ITEMSIZE[skeleton.dtype]
    model = ModelFigures(
        name=source.name,
        architecture=skeleton.architecture,
        parameters=skeleton.parameters,
        context_length=skeleton.context_length,
        weight_bytes=source.file_bytes or stored_bytes,
        adapter_bytes=source.adapter,
        dtype=skeleton.dtype,
        groups=skeleton.groups,
        itemsize=size,
        kv_bytes_per_token=sizing.bytes_per_token(skeleton.groups, size),
        state_bytes_per_sequence=sizing.row_state_bytes(skeleton.groups),
        refusal=skeleton.refusal,
        notes=skeleton.notes + source.notes,
    )
    size_here = 4 if machine.on_cpu else size
    weights_here, form = _loaded_weights(stored_bytes, skeleton, machine)
    sight = _plan_sight(source, skeleton, machine, form) if sees and keep is None else None
    images = 0 if sight is None else sight.total
    if sight is not None and not machine.on_cpu:
        weights_here -= sight.weights  # the files have both
    weights_here += source.adapter
    groups = skeleton.widened_groups if machine.on_cpu else skeleton.groups
    context = skeleton.context_length
    row = None if keep is None else keep.max_row_tokens
    per_token = sizing.bytes_per_token(groups, size_here)
    paged, max_rows = skeleton.most_rows is None, load.rows
    tail_bytes = sizing.tail_bytes(groups, max_rows, size_here) if paged else 0
    logits = sizing.logits_bytes(min(max_rows, skeleton.most_rows or max_rows), skeleton.vocab_size)
    arena_groups = groups if paged else ()  # mlx-lm's own caches have no snapshots
    states, state = sizing.step_state_bytes(arena_groups, max_rows), sizing.row_state_bytes(arena_groups)
    draft_bytes, draft_groups = _draft_memory(draft, skeleton, machine, max_rows)
    reserved_bytes = weights_here + tail_bytes + logits + states + draft_bytes + images
    free = max(machine.working_set - reserved_bytes, 0)
    memory = kv_memory or sizing.default_kv_bytes(
        (*groups, *draft_groups), load, min(context, row or context), machine.working_set, reserved_bytes, size_here
    )
    of_draft = sizing.draft_kv_bytes(memory, groups, draft_groups, min(context, row or context), size_here)
    memory -= of_draft
    arena, snapshots = sizing.split_memory(arena_groups, memory, max_rows)
    blocks = sizing.blocks_that_fit(arena, paged_groups(groups), load, size_here) if per_token else ()
    tokens = max(blocks, default=0) * load.block_size  # in the layers that see farthest
    if kv_memory is not None:
        sizing.check_kv_memory(kv_memory, machine.memory, machine.working_set, machine_phrase(machine.is_local))
    if keep is not None:
        keep.check(context, tokens or context)
    requested_blocks = blocks if kv_memory is not None and per_token else None
    shown_lengths = lengths or (*(n for n in LENGTHS if n < context), context)
    figures = MachineFigures(
        assumed=not machine.is_local,
        memory_bytes=machine.memory,
        working_set_bytes=machine.working_set,
        weight_bytes=weights_here,
        weights_as=form,
        itemsize=size_here,
        kv_form=describe_quantization(groups) or f"{size_here} bytes per number",
        kv_bytes_per_token=per_token,
        tail_bytes=tail_bytes,
        logits_bytes=logits,
        states_bytes=states,
        draft_bytes=draft_bytes,
        draft_kv_bytes=of_draft,
        image_bytes=images,
        reserved_bytes=reserved_bytes,
        free_bytes=free,
        fits=sizing.tokens_that_fit((*groups, *draft_groups), free, size_here),
        limited=requested_blocks is not None,
        arena_bytes=arena if per_token else 0,
        arena_tokens=tokens,
        snapshots=snapshots,
        snapshot_bytes=snapshots * state,
        row_tokens=row,
        longest_text=row or min(context, tokens or context),
        total_bytes=reserved_bytes + of_draft + (arena if per_token else 0) + snapshots * state,
        lengths=tuple(
            _length_figures(groups, n, row, load.block_size, size_here, free, skeleton.most_rows, requested_blocks)
            for n in shown_lengths
        ),
    )
    return MemoryPlan(model, figures)


def _draft_memory(
    draft: Skeleton | None, skeleton: Skeleton, machine: TargetMachine, rows: int
) -> tuple[int, tuple[LayerGroup, ...]]:
    """Return a draft's bytes without keys and values, and its groups: 0 and () if absent or unusable for `skeleton`."""
    if draft is None or skeleton.most_rows is not None:
        return 0, ()
    stored_bytes, groups = draft.weight_bytes, draft.widened_groups if machine.on_cpu else draft.groups
    weights, _ = _loaded_weights(stored_bytes, draft, machine)
    return sizing.reserved_bytes(groups, rows, draft.vocab_size, weights), groups


def _plan_sight(source: PlanSource, skeleton: Skeleton, machine: TargetMachine, form: str) -> SightBytes | None:
    """Return the memory for images; None if the model does not see images, or if its files are not here."""
    import mlx.core as mx

    from cortexmlx.execution.sight_memory import predict_model_sight_bytes

    if source.folder is None or skeleton.refusal is not None or skeleton.most_rows is not None:
        return None
    dtype = mx.float32 if machine.on_cpu else getattr(mx, skeleton.dtype)
    packed = form != EXPANDED and "quantization" in source.config
    return predict_model_sight_bytes(source.folder, source.config, dtype, keep_packed=packed)


def _length_figures(
    groups: tuple[LayerGroup, ...],
    tokens: int,
    row: int | None,
    block_size: int,
    itemsize: int,
    free: int,
    max_rows: int | None,
    blocks: GroupCounts | None,
) -> LengthFigures:
    kept_tokens = tokens if row is None else min(tokens, row)
    if max_rows is None:
        needed_bytes = sizing.row_kv_bytes(groups, kept_tokens, block_size, itemsize)
    else:  # mlx-lm's own caches have no blocks
        needed_bytes = sizing.sequence_bytes(groups, kept_tokens, itemsize)
    if blocks is None:
        fit = free // needed_bytes if needed_bytes else 0
    else:
        fit = sizing.sequences_that_fit(paged_groups(groups), blocks, block_size, kept_tokens)
    return LengthFigures(tokens, needed_bytes, fit if max_rows is None else min(fit, max_rows))


def _loaded_weights(stored_bytes: int, skeleton: Skeleton, machine: TargetMachine) -> tuple[int, str]:
    """Return bytes and form of the weights in memory. On a CPU, as `load_model` chooses: float32 is fastest there."""
    from cortexmlx.models.load import is_float32_affordable

    if not machine.on_cpu:
        return stored_bytes, "as stored"
    if is_float32_affordable(skeleton.parameters, machine.memory):
        return skeleton.parameters * 4, EXPANDED
    if skeleton.widened_bytes >= skeleton.parameters * 4:
        return skeleton.widened_bytes, "float32, as MLX's CPU build needs it"
    return skeleton.widened_bytes, "quantized as stored, the rest float32"
