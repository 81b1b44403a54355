"""`cortexmlx plan`: the memory that a model needs, and what fits in this machine, before loading."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from cortexmlx.cli import options
from cortexmlx.cli.plan.run import RunFigures
from cortexmlx.cli.planning.figures import MachineFigures, MemoryPlan, ModelFigures
from cortexmlx.cli.planning.hosts import DistributedFigures
from cortexmlx.cli.planning.machine import machine_phrase
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import to_single_line
from cortexmlx.core.config import EngineConfig
from cortexmlx.kv import sizing
from cortexmlx.kv.sizing import ArenaDemand, format_bytes
from cortexmlx.kv.spec import LayerGroup
from cortexmlx.models.resolve import STARTER

LABEL = 16
VALUE = 12
WIDTH = 80


_IMAGES = "the vision tower, features, and the largest image"

_WAY_TEXTS = {
    "tensor": "each has a part of every layer (tensor parallel)",
    "pipeline": "each has some layers (pipeline)",
}


def plan_text(plan: MemoryPlan, runs: Sequence[RunFigures] = (), distributed: DistributedFigures | None = None) -> str:
    """Return the whole plan as text, at most 80 columns wide for ordinary models."""
    machine_lines = _machine_lines(plan.here, plan.model.context_length)
    hosts = () if distributed is None else _distributed_lines(distributed, plan.here, plan.model.context_length)
    return "\n".join([*_model_lines(plan.model), "", *machine_lines, *_run_lines(runs), *hosts])


def _model_lines(model: ModelFigures) -> Iterator[str]:
    """Yield the plan's lines about the model by itself."""
    millions = model.parameters / 1e6
    size = f"{millions / 1e3:.2f} B" if millions >= 999.5 else f"{millions:.0f} M"
    name = f"{to_single_line(model.name)}: {to_single_line(model.architecture)}"
    yield f"{name}, {size} parameters, context {model.context_length:,} tokens"
    yield figure_line("weights", format_bytes(model.weight_bytes), "as stored")
    if model.adapter_bytes:
        yield figure_line("adapter", format_bytes(model.adapter_bytes), "as stored")
    yield from kv_lines(model.groups, model.kv_bytes_per_token, model.itemsize)
    if model.state_bytes_per_sequence:
        yield figure_line("state", format_bytes(model.state_bytes_per_sequence), "per sequence, whatever its length")
    refusal = (f"cortexmlx does not run it yet: {model.refusal}",) if model.refusal else ()
    for note in (*refusal, *model.notes):
        yield from _indented_lines(note)


def _machine_lines(figures: MachineFigures, context: int) -> Iterator[str]:
    """Yield the plan's lines about the model on one machine: memory, KV bytes and the tokens that fit."""
    memory_text = f"{format_bytes(figures.working_set_bytes)} of it for models"
    if figures.assumed:
        yield f"On a Mac with {format_bytes(figures.memory_bytes)}: {memory_text}, as macOS gives its GPU at least"
    else:
        yield f"On this machine: {format_bytes(figures.memory_bytes)}, {memory_text}"
    yield figure_line("weights", format_bytes(figures.weight_bytes), figures.weights_as)
    yield figure_line("KV per token", format_bytes(figures.kv_bytes_per_token), figures.kv_form)
    yield figure_line("tails", format_bytes(figures.tail_bytes), "the rows' newest tokens, not yet in the arena")
    yield figure_line("logits", format_bytes(figures.logits_bytes), "of one step")
    if figures.states_bytes:
        yield figure_line("states", format_bytes(figures.states_bytes), "of the rows, in recurrent layers")
    if figures.draft_bytes:
        yield figure_line("draft model", format_bytes(figures.draft_bytes), "its weights, tails and logits")
    if figures.image_bytes:
        yield figure_line("images", format_bytes(figures.image_bytes), _IMAGES)
    capacity = "" if figures.limited and figures.free_bytes else _capacity_text(figures, context)  # the arena's counts
    yield figure_line("left for KV", format_bytes(figures.free_bytes), capacity)
    hint = "" if figures.limited else " (--kv-memory changes it)"
    none = "tokens take none" if not figures.kv_bytes_per_token else "nothing is left for it"
    arena = f"{figures.arena_tokens:,} tokens{hint}" if figures.arena_bytes else none
    yield figure_line("arena", format_bytes(figures.arena_bytes), arena)
    if figures.draft_kv_bytes:
        yield figure_line(
            "draft's arena", format_bytes(figures.draft_kv_bytes), "its part of the KV memory, for as many tokens"
        )
    warnings = sizing.kv_memory_warning(
        figures.arena_bytes + figures.draft_kv_bytes, figures.free_bytes, machine_phrase(not figures.assumed)
    )
    for warning in warnings if figures.limited else ():
        yield from _indented_lines(warning)
    if figures.row_tokens is not None:
        yield figure_line("of a row", f"{figures.row_tokens:,}", "tokens at most, whatever the length of its text")
    if figures.snapshots:
        remark = f"{figures.snapshots:,} states of beginnings that can be used again"
        yield figure_line("snapshots", format_bytes(figures.snapshot_bytes), remark)
    if figures.arena_bytes or figures.snapshots:
        limit = "all that the arena holds" if figures.longest_text < context else "the model's context"
        limit = limit if figures.row_tokens is None else "all that a row keeps"
        yield figure_line("total", format_bytes(figures.total_bytes), "with a full arena, without what steps take")
        yield figure_line("", "", f"(--context {figures.longest_text} adds it: {limit})")
    yield ""
    memory_phrase = "the arena" if figures.limited else "what is left for KV"
    yield f"{'tokens':>11}  {'KV memory':>10}  sequences that fit into {memory_phrase}"
    for entry in figures.lengths:
        remark = ""
        if entry.tokens > context and figures.row_tokens is None:
            remark = "  longer than the model's context"
        elif figures.limited and not entry.sequences:
            remark = "  needs a larger --kv-memory"
        yield f"{entry.tokens:>11,}  {format_bytes(entry.bytes):>10}  {entry.sequences:,}{remark}"


def _run_lines(runs: Sequence[RunFigures]) -> Iterator[str]:
    """Yield the plan's lines about the peak memory of each run."""
    for run in runs:
        yield ""
        yield f"{run.rows:,} x {run.tokens:,} tokens at once, with all of the cache in use"
        yield figure_line("weights", format_bytes(run.weight_bytes), "")
        if run.image_bytes:
            yield figure_line("images", format_bytes(run.image_bytes), _IMAGES)
        yield figure_line("arena", format_bytes(run.arena_bytes), "with two spare blocks for each kind of layer")
        if run.states_bytes or run.snapshot_bytes:
            yield figure_line(
                "states", format_bytes(run.states_bytes + run.snapshot_bytes), "of the rows, and snapshots"
            )
        yield figure_line("prefill step", format_bytes(run.prefill_bytes), "the largest, which comes and goes")
        if run.verify_bytes:
            yield figure_line("verify step", format_bytes(run.verify_bytes), "or this, with drafts to verify")
        yield figure_line("decode step", format_bytes(run.tail_bytes + run.decode_bytes), "or this, with the tail")
        yield figure_line("peak", format_bytes(run.peak_bytes), "of MLX's memory at most, but for 2 % plus 8 MiB")


def _distributed_lines(distributed: DistributedFigures, figures: MachineFigures, context: int) -> Iterator[str]:
    """Yield the plan's lines about a model that is cut for several machines: a table with a row for each rank."""
    yield ""
    if distributed.refusal is not None:
        yield from textwrap.wrap(to_single_line(distributed.refusal), WIDTH)
        return
    like = "of that size" if figures.assumed else "like this one"
    yield f"On {distributed.hosts} machines {like}: {_WAY_TEXTS[str(distributed.way)]}"
    yield f"{'rank':>6}  {'layers':>6}  {'weights':>10}  {'KV per token':>12}  {'left for KV':>11}  one sequence"
    for host in distributed.ranks:
        sizes = [format_bytes(n) for n in (host.weight_bytes, host.kv_bytes_per_token, host.free_bytes)]
        fits = f"{host.fits:,} tokens" if host.fits is not None and host.fits < context else "the whole context"
        fits = fits if host.free_bytes else "does not fit"
        yield f"{host.rank:>6}  {host.layers:>6}  {sizes[0]:>10}  {sizes[1]:>12}  {sizes[2]:>11}  {fits}"
    *first, last = map(str, distributed.would_do)
    numbers = f"{', '.join(first)} or {last}" if first else last
    yield from _indented_lines(
        f"It can be cut for {numbers} machines. Several processes on one machine share its memory."
    )


def _indented_lines(text: str) -> list[str]:
    """Return the text wrapped to lines that are indented as the plan's figures are."""
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def figure_line(label: str, value: str, remark: str) -> str:
    """Return a line of the plan: label, value and remark."""
    return f"  {label:<{LABEL}}{value:<{VALUE}}{remark}".rstrip()


def kv_lines(groups: tuple[LayerGroup, ...], per_token: int, itemsize: int) -> Iterator[str]:
    """Yield the KV bytes per token and their arithmetic, a line per kind of layer."""
    label, value = "KV per token", format_bytes(per_token)
    for group in groups:
        if group.spec.kv_heads:
            yield figure_line(label, value, _kv_formula(group, itemsize))
            label = value = ""
    if label:
        yield figure_line(label, value, "no layer keeps keys and values")


def _kv_formula(group: LayerGroup, itemsize: int) -> str:
    """Return the arithmetic of a layer group's KV bytes per token, in words."""
    spec = group.spec
    kind = "chunks of" if spec.chunked else "window"
    window = f", {kind} {spec.window:,}" if spec.window else ""
    heads = f"{spec.kv_heads} head{'s' * (spec.kv_heads != 1)}"
    each = f"{itemsize} bytes"
    if spec.kv_bits is not None:
        each = f"({spec.kv_bits} bits + {2 * itemsize} bytes for {spec.kv_group_size})"
    return f"{len(group.layers)} layers x {heads} x ({spec.key_dim} + {spec.value_dim}) x {each}{window}"


def _capacity_text(figures: MachineFigures, context: int) -> str:
    """Return in words how long a single sequence may be, and whether memory or the model's context limits it."""
    if not figures.free_bytes:
        return "the weights alone are too large"
    if figures.fits is not None and figures.fits < (figures.row_tokens or context):
        return f"{figures.fits:,} tokens in one sequence, of a context of {context:,}"
    if figures.row_tokens is not None:
        return "any length: what is kept does not grow with it"
    return f"{context:,} tokens in one sequence, the model's context"


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="As for generate, or a config.json; weights are not needed.",
            show_default=False,
            autocompletion=options.complete_model,
        ),
    ] = None,
    model_option: options.ModelOption = None,
    adapter: options.Adapter = None,
    adapters: options.Adapters = None,
    draft: options.Draft = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            "--context",
            "--tokens",
            metavar="N",
            min=1,
            help="Tokens per sequence, and what a run of those takes; may be repeated.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="SIZE", help="On a Mac with so much, like 64GB, instead of here.", show_default=False
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            metavar="HOSTS",
            help="What each of N machines has, or those of a host file, if the model is spread over them.",
            show_default=False,
        ),
    ] = None,
    kv_memory: options.KVMemory = None,
    kv_bits: options.KVBits = None,
    kv_group_size: options.KVGroupSize = None,
    block_size: options.BlockSize = EngineConfig.block_size,
    max_rows: options.MaxRows = EngineConfig.max_rows,
    prefill_budget: options.PrefillBudget = EngineConfig.prefill_budget,
    keep_first: options.KeepFirst = None,
    keep_last: options.KeepLast = None,
    as_json: Annotated[bool, typer.Option("--json", help="All figures as one JSON object, in bytes.")] = False,
) -> None:
    """Say what fits: weights, KV bytes per token, and the tokens that the memory of this or another machine holds.

    KV bytes per token = layers x KV heads x (key + value numbers) x bytes. Nothing is loaded or downloaded but the
    model's configuration.
    """
    config = EngineConfig(
        STARTER,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        block_size=block_size,
        max_rows=max_rows,
        prefill_budget=prefill_budget,
        keep_first=keep_first,
        keep_last=keep_last,
        draft=draft,
    )
    folders = (*([] if adapter is None else [adapter]), *(options.parse_adapters(adapters) or {}).values())
    if hosts is not None and (folders or draft is not None):
        raise typer.BadParameter("adapters and draft models run on one machine only", param_hint="--hosts")
    from cortexmlx.attention.backends import auto_backend_name
    from cortexmlx.cli.plan.run import plan_runs
    from cortexmlx.cli.planning.figures import make_plan
    from cortexmlx.cli.planning.hosts import plan_hosts
    from cortexmlx.cli.planning.machine import mac_with_memory, parse_sold_memory, this_machine
    from cortexmlx.cli.planning.skeleton import Skeleton, add_drafts, build_skeleton
    from cortexmlx.cli.planning.source import find_source
    from cortexmlx.distributed.spec import Hosts
    from cortexmlx.models.adapters.files import read_adapter

    config = replace(config, kv_memory=options.parse_memory_size(kv_memory))
    with options.wrong_usage("--memory"):
        machine = this_machine() if memory is None else mac_with_memory(parse_sold_memory(memory))
    lengths = tuple(context or ())
    host_count = None if hosts is None else Hosts.parse(hosts).ranks
    source = find_source(options.model_name(model, model_option))
    source = replace(source, adapter=sum(read_adapter(folder).added_bytes for folder in folders))
    skeleton = build_skeleton(source.config).with_quantized_kv(config.kv_bits, config.kv_group_size)
    drafting: Skeleton | None = None
    if hosts is None:
        skeleton, drafting = add_drafts(skeleton, source, config)
    on_gpu = (memory is not None or auto_backend_name() == "metal") and hosts is None  # hosts have no larger pieces
    load = ArenaDemand.from_options(config.max_rows, config.prefill_budget, config.block_size, on_gpu)
    figures = make_plan(
        source,
        skeleton,
        machine,
        load=load,
        kv_memory=config.kv_bytes,
        keep=config.keep,
        lengths=lengths,
        draft=drafting,
        sees=hosts is None,
    )
    distributed = None
    if host_count is not None:
        kv = (config.kv_bits, config.kv_group_size)
        distributed = plan_hosts(source.name, skeleton, machine, figures.here, load, host_count, kv)
    with_runs = hosts is None and drafting is None and machine.on_cpu == this_machine().on_cpu
    runs = plan_runs(skeleton, machine, figures.here, config, load, lengths) if with_runs else ()
    if as_json:
        console.print_result(json.dumps(plan_json(figures, runs, distributed)))
        return
    console.print_result(plan_text(figures, runs, distributed))
    if lengths and hosts is None and machine.on_cpu != this_machine().on_cpu:
        console.print_result("\nWhat a run takes beside this, step by step, can be planned on a Mac only.")


def plan_json(
    figures: MemoryPlan, runs: Sequence[RunFigures] = (), distributed: DistributedFigures | None = None
) -> dict[str, Any]:
    """Return the plan for `--json`. Layers that keep the same numbers share one entry of `shapes`."""
    data = {**asdict(figures), "runs": [asdict(run) for run in runs]}
    if distributed is not None:
        data["hosts"] = asdict(distributed)
    groups = data["model"].pop("groups")
    data["model"]["shapes"] = [
        {
            "layers": len(group["layers"]),
            "kv_heads": group["spec"]["kv_heads"],
            "k_dim": group["spec"]["key_dim"],
            "v_dim": group["spec"]["value_dim"],
            "window": group["spec"]["window"],
            "chunked": group["spec"]["chunked"],
            "row_bytes": group["spec"]["row_bytes"] * len(group["layers"]),
        }
        for group in groups
    ]
    return data
