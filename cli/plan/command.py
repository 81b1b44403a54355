"""`cortexmlx plan`: the memory that a model needs, and what fits in this machine, before loading."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cortexmlx.cli import options
from cortexmlx.cli.plan.text import kv_lines, line, page
from cortexmlx.cli.terminal import console
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import Load, bytes_per_token, format_bytes, sequence_bytes
from cortexmlx.kv.spec import KVSpec, LayerGroup, quantized
from cortexmlx.models.resolve import STARTER

if TYPE_CHECKING:
    from cortexmlx.cli.plan.run import Run
    from cortexmlx.cli.planning.figures import Plan
    from cortexmlx.cli.planning.hosts import HostsFigures


_OF_A_MACHINE = ("memory", "kv_memory", "block_size", "max_rows", "prefill_budget", "keep_first", "keep_last", "hosts")
"""Parameters of a machine, which do not apply to a shape alone."""


def plan(
    ctx: typer.Context,
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
    itemsize: Annotated[
        int | None, typer.Option("--bytes", metavar="N", min=1, help="Bytes of a cached number.", show_default=False)
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option("--layers", metavar="N", min=1, help="Instead of MODEL: its shape.", show_default=False),
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", metavar="N", min=1, help="KV heads.", show_default=False)
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option("--head-dim", metavar="N", min=1, help="Numbers per key.", show_default=False)
    ] = None,
    value_dim: Annotated[
        int | None,
        typer.Option("--value-dim", metavar="N", min=0, help="Per value, if other than the key.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All figures as one JSON object, in bytes.")] = False,
) -> None:
    """Say what fits: weights, KV bytes per token, and the tokens that the memory of this or another machine holds.

    KV bytes per token = layers x KV heads x (key + value numbers) x bytes. Nothing is loaded or downloaded but the
    model's configuration. For example, without any model: --layers 36 --kv-heads 8 --head-dim 128
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
    folders = (*([] if adapter is None else [adapter]), *(options.adapters_of(adapters) or {}).values())
    shape = (layers, kv_heads, head_dim)
    if any(n is not None for n in (*shape, value_dim)):
        if model is not None or model_option is not None or folders or draft is not None:
            raise typer.BadParameter("give a MODEL or its shape, not both")
        if layers is None or kv_heads is None or head_dim is None:
            raise typer.BadParameter("a shape is --layers, --kv-heads and --head-dim together")
        for name in options.given(ctx):
            if name in _OF_A_MACHINE:
                hint = f"--{name.replace('_', '-')}"
                raise typer.BadParameter("says nothing to a shape: leave it out", param_hint=hint)
        spec = KVSpec(kv_heads, head_dim, head_dim if value_dim is None else value_dim, "float16")
        (group,) = quantized((LayerGroup(spec, tuple(range(layers))),), config.kv_bits, config.kv_group_size)
        plan_shape(group, tuple(context or ()), itemsize or spec.itemsize, as_json)
        return
    if hosts is not None and (folders or draft is not None):
        raise typer.BadParameter("adapters and draft models run on one machine only", param_hint="--hosts")
    plan_model(
        options.model_name(model, model_option),
        folders,
        tuple(context or ()),
        replace(config, kv_memory=options.memory_size(kv_memory)),
        itemsize,
        as_json,
        _sold(memory),
        _count(hosts),
    )


def _sold(memory: str | None) -> int | None:
    from cortexmlx.cli.planning.machine import sold_memory

    try:
        return None if memory is None else sold_memory(memory)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error), param_hint="--memory") from None


def _count(hosts: str | None) -> int | None:
    from cortexmlx.distributed.spec import Hosts

    return None if hosts is None else Hosts.parse(hosts).ranks


def plan_shape(group: LayerGroup, lengths: tuple[int, ...], itemsize: int, as_json: bool) -> None:
    """Print the arithmetic for a shape that is given by hand."""
    per_token = bytes_per_token([group], itemsize)
    totals = {tokens: sequence_bytes([group], tokens, itemsize) for tokens in lengths}
    if as_json:
        table = [{"tokens": tokens, "bytes": size} for tokens, size in totals.items()]
        console.say(json.dumps({"kv_bytes_per_token": per_token, "lengths": table}))
        return
    console.say("\n".join(kv_lines((group,), per_token, itemsize)))
    for tokens, size in totals.items():
        console.say(line(f"{tokens:,} tokens", format_bytes(size), f"{size:,} bytes"))


def plan_model(
    target: str,
    adapters: Sequence[str],
    lengths: tuple[int, ...],
    config: EngineConfig,
    itemsize: int | None,
    as_json: bool,
    memory: int | None = None,
    hosts: int | None = None,
) -> None:
    """Print the plan of a model for an engine with this configuration, and for runs of sequences of these lengths. The
    machine is this one, or a Mac with `memory` bytes. With `hosts`, say what each of so many such machines has.
    """
    from cortexmlx.cli.plan.run import plan_runs
    from cortexmlx.cli.planning.figures import make_plan
    from cortexmlx.cli.planning.hosts import plan_hosts
    from cortexmlx.cli.planning.machine import mac, this_machine
    from cortexmlx.cli.planning.skeleton import build, build_draft
    from cortexmlx.cli.planning.source import find
    from cortexmlx.models.adapters.files import read_adapter

    source = find(target)
    source = replace(source, adapter=sum(read_adapter(folder).added_bytes for folder in adapters))
    skeleton = build(source.config).quantized(config.kv_bits, config.kv_group_size)
    draft = None if config.draft is None else build_draft(str(config.draft))
    machine = this_machine() if memory is None else mac(memory)
    load = Load(config.max_rows, config.prefill_budget, config.block_size)
    figures = make_plan(
        source,
        skeleton,
        machine,
        load=load,
        kv_memory=config.kv_bytes,
        keep=config.keep,
        itemsize=itemsize,
        lengths=lengths,
        draft=draft,
    )
    spread = None
    if hosts is not None:
        kv = (config.kv_bits, config.kv_group_size)
        spread = plan_hosts(source.name, skeleton, machine, figures.here, load, hosts, kv)
    replayed = hosts is None and draft is None and itemsize is None and machine.on_cpu == this_machine().on_cpu
    runs = plan_runs(skeleton, machine, figures.here, config, load, lengths) if replayed else ()
    if as_json:
        console.say(json.dumps(json_figures(figures, runs, spread)))
        return
    console.say(page(figures, runs, spread))
    if lengths and hosts is None and machine.on_cpu != this_machine().on_cpu:
        console.say("\nWhat a run takes beside this, step by step, can be planned on a Mac only.")


def json_figures(figures: Plan, runs: Sequence[Run] = (), spread: HostsFigures | None = None) -> dict[str, Any]:
    """Return the figures for `--json`. Layers that keep the same numbers share one entry of `shapes`."""
    data = {**asdict(figures), "runs": [asdict(run) for run in runs]}
    if spread is not None:
        data["hosts"] = asdict(spread)
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
