"""A plan as a page of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from cortexmlx.cli.plan.run import Run
from cortexmlx.cli.planning.figures import MachineFigures, ModelFigures, Plan
from cortexmlx.cli.planning.hosts import HostsFigures
from cortexmlx.cli.planning.machine import called
from cortexmlx.cli.terminal.harmless import in_a_line
from cortexmlx.kv import sizing
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.kv.spec import LayerGroup

LABEL = 16
VALUE = 12
WIDTH = 80


_WAYS = {"tensor": "each has a part of every layer (tensor parallel)", "pipeline": "each has some layers (pipeline)"}


def page(plan: Plan, runs: Sequence[Run] = (), spread: HostsFigures | None = None) -> str:
    """Return the whole plan, at most 80 columns wide for ordinary models."""
    here = _here(plan.here, plan.model.context_length)
    hosts = () if spread is None else _hosts(spread, called(not plan.here.assumed))
    return "\n".join([*_model(plan.model), "", *here, *_runs(runs), *hosts])


def _model(model: ModelFigures) -> Iterator[str]:
    millions = model.parameters / 1e6
    size = f"{millions / 1e3:.2f} B" if millions >= 999.5 else f"{millions:.0f} M"
    name = f"{in_a_line(model.name)}: {in_a_line(model.architecture)}"
    yield f"{name}, {size} parameters, context {model.context_length:,} tokens"
    yield line("weights", format_bytes(model.weight_bytes), "as stored")
    if model.adapter_bytes:
        yield line("adapter", format_bytes(model.adapter_bytes), "as stored")
    yield from kv_lines(model.groups, model.kv_bytes_per_token, model.itemsize)
    if model.state_bytes_per_sequence:
        yield line("state", format_bytes(model.state_bytes_per_sequence), "per sequence, whatever its length")
    refusal = (f"cortexmlx does not run it yet: {model.refusal}",) if model.refusal else ()
    for says in (*refusal, *model.notes):
        yield from textwrap.wrap(says, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _here(here: MachineFigures, context: int) -> Iterator[str]:
    room = f"{format_bytes(here.working_set_bytes)} of it for models"
    if here.assumed:
        yield f"On a Mac with {format_bytes(here.memory_bytes)}: {room}, as macOS gives its GPU at least"
    else:
        yield f"On this machine: {format_bytes(here.memory_bytes)}, {room}"
    yield line("weights", format_bytes(here.weight_bytes), here.weights_as)
    yield line("KV per token", format_bytes(here.kv_bytes_per_token), here.kv_form)
    yield line("tails", format_bytes(here.tail_bytes), "the rows' newest tokens, not yet in the arena")
    yield line("logits", format_bytes(here.logits_bytes), "of one step")
    if here.states_bytes:
        yield line("states", format_bytes(here.states_bytes), "of the rows, in recurrent layers")
    if here.draft_bytes:
        yield line("draft model", format_bytes(here.draft_bytes), "its weights, tails and logits")
    yield line("left for KV", format_bytes(here.free_bytes), _fits(here))
    said = "" if here.limited else " (--kv-memory changes it)"
    none = "tokens take none" if not here.kv_bytes_per_token else "nothing is left for it"
    arena = f"{here.arena_tokens:,} tokens{said}" if here.arena_bytes else none
    yield line("arena", format_bytes(here.arena_bytes), arena)
    if here.draft_kv_bytes:
        yield line("draft's arena", format_bytes(here.draft_kv_bytes), "its part of the KV memory, for as many tokens")
    beyond = sizing.beyond_note(here.arena_bytes + here.draft_kv_bytes, here.free_bytes, called(not here.assumed))
    for says in beyond if here.limited else ():
        yield from textwrap.wrap(says, WIDTH, initial_indent="  ", subsequent_indent="  ")
    if here.row_tokens is not None:
        kept = "tokens at most, whatever the length of its text"
        yield line("of a row", f"{here.row_tokens:,}", kept)
    if here.snapshots:
        remark = f"{here.snapshots:,} states of beginnings that can be used again"
        yield line("snapshots", format_bytes(here.snapshot_bytes), remark)
    yield ""
    where = "the arena" if here.limited else "what is left for KV"
    yield f"{'tokens':>11}  {'KV memory':>10}  sequences that fit into {where}"
    for entry in here.lengths:
        remark = ""
        if entry.tokens > context and here.row_tokens is None:
            remark = "  longer than the model's context"
        elif here.limited and not entry.sequences:
            remark = "  needs a larger --kv-memory"
        yield f"{entry.tokens:>11,}  {format_bytes(entry.bytes):>10}  {entry.sequences:,}{remark}"


def _runs(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        yield ""
        yield f"{run.rows:,} x {run.tokens:,} tokens at once, with all of the cache in use"
        yield line("weights", format_bytes(run.weight_bytes), "")
        yield line("arena", format_bytes(run.arena_bytes), "with two spare blocks for each kind of layer")
        if run.states_bytes or run.snapshot_bytes:
            yield line("states", format_bytes(run.states_bytes + run.snapshot_bytes), "of the rows, and snapshots")
        yield line("prefill step", format_bytes(run.prefill_bytes), "the largest, which comes and goes")
        if run.verify_bytes:
            yield line("verify step", format_bytes(run.verify_bytes), "or this, with drafts to verify")
        yield line("decode step", format_bytes(run.tail_bytes + run.decode_bytes), "or this, with the tail")
        yield line("peak", format_bytes(run.peak_bytes), "of MLX's memory at most, but for 2 % plus 8 MiB")


def _hosts(spread: HostsFigures, machine: str) -> Iterator[str]:
    yield ""
    if spread.refusal is not None:
        yield from textwrap.wrap(in_a_line(spread.refusal), WIDTH)
        return
    like = "like this one" if machine == "this machine" else "of that size"
    yield f"On {spread.hosts} machines {like}: {_WAYS[str(spread.way)]}"
    yield f"{'rank':>6}  {'layers':>6}  {'weights':>10}  {'KV per token':>12}  {'left for KV':>11}  one sequence"
    for host in spread.ranks:
        sizes = [format_bytes(n) for n in (host.weight_bytes, host.kv_bytes_per_token, host.free_bytes)]
        fits = "any length" if host.fits is None else f"{host.fits:,} tokens" if host.free_bytes else "does not fit"
        yield f"{host.rank:>6}  {host.layers:>6}  {sizes[0]:>10}  {sizes[1]:>12}  {sizes[2]:>11}  {fits}"
    *first, last = map(str, spread.would_do)
    numbers = f"{', '.join(first)} or {last}" if first else last
    yield from textwrap.wrap(
        f"It can be cut for {numbers} machines. Several processes on one machine share its memory.",
        WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
    )


def line(label: str, value: str, remark: str) -> str:
    """Return one figure."""
    return f"  {label:<{LABEL}}{value:<{VALUE}}{remark}".rstrip()


def kv_lines(groups: tuple[LayerGroup, ...], per_token: int, itemsize: int) -> Iterator[str]:
    """Return the bytes per token and where they come from, a line per kind of layer."""
    label, value = "KV per token", format_bytes(per_token)
    for group in groups:
        if group.spec.kv_heads:
            yield line(label, value, _formula(group, itemsize))
            label = value = ""
    if label:
        yield line(label, value, "no layer keeps keys and values")


def _formula(group: LayerGroup, itemsize: int) -> str:
    spec = group.spec
    kind = "chunks of" if spec.chunked else "window"
    window = f", {kind} {spec.window:,}" if spec.window else ""
    heads = f"{spec.kv_heads} head{'s' * (spec.kv_heads != 1)}"
    each = f"{itemsize} bytes"
    if spec.kv_bits is not None:
        each = f"({spec.kv_bits} bits + {2 * itemsize} bytes for {spec.kv_group_size})"
    return f"{len(group.layers)} layers x {heads} x ({spec.key_dim} + {spec.value_dim}) x {each}{window}"


def _fits(here: MachineFigures) -> str:
    if here.fits is None:
        return "any length: what is kept does not grow with it"
    if not here.free_bytes:
        return "the weights alone are too large"
    return f"{here.fits:,} tokens in one sequence"
